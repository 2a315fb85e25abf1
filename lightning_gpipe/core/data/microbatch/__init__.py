"""How a mini-batch is split into micro-batches, and their outputs are merged.

Most batches are split by the rows of their tensors (``rows``). Where the cost of a row varies, rows
of similar cost can be put into one micro-batch (``padded``), and a user can write another way to
split and merge (``interface``).
"""

from lightning_gpipe.core.data.microbatch.interface import MicroBatching

__all__ = [
    "MicroBatching",
]
