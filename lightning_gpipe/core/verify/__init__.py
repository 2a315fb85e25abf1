"""Whether a pipeline computes what its layers compute: one batch run plain and pipelined, compared.

Output, gradients and buffers are compared, the first layer that differs is named, and the state of
the pipeline is restored.
"""

from lightning_gpipe.core.verify.first_batch import EachVerifiedOnce, VerifiedOnce
from lightning_gpipe.core.verify.parity import Parity, Verdict
from lightning_gpipe.core.verify.step import verify_step
from lightning_gpipe.core.verify.step_parity import LossParity, StepParity
from lightning_gpipe.core.verify.verification import verify, verify_program

__all__ = [
    "EachVerifiedOnce",
    "LossParity",
    "Parity",
    "StepParity",
    "Verdict",
    "VerifiedOnce",
    "verify",
    "verify_program",
    "verify_step",
]
