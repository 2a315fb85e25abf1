"""Verification that a pipeline computes what its layers compute: one batch run plain and pipelined.

The first layer that differs is named, and the state of the pipeline is restored.
"""

from lightning_gpipe.core.verify.parity import LossParity, Parity, StepParity, Verdict
from lightning_gpipe.core.verify.step_verification import verify_step, verify_step_sample
from lightning_gpipe.core.verify.verification import FirstBatchVerifier, verify
