"""How a mini-batch becomes micro-batches, and their outputs one output again.

For most batches the answer is the rows of their tensors (``rows``); where the cost of a row varies
it may be worth to choose which rows go together (``padded``), and a user can do that in a way of
their own (``interface``).
"""

from lightning_gpipe.core.data.microbatch.interface import MicroBatching

__all__ = [
    "MicroBatching",
]
