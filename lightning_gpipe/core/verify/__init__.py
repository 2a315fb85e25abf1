"""Whether a pipeline computes what its layers compute: one batch run plain and pipelined, compared.

Output, gradients and buffers are compared, the first layer that differs is named, and the state of
the pipeline is restored.
"""

from lightning_gpipe.core.verify.first_batch import EachVerifiedOnce, VerifiedOnce
from lightning_gpipe.core.verify.parity import Parity
from lightning_gpipe.core.verify.verification import verify, verify_program

__all__ = [
    "EachVerifiedOnce",
    "Parity",
    "VerifiedOnce",
    "verify",
    "verify_program",
]
