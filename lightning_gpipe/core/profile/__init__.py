"""What layers cost, and layers run one by one on a whole batch, to observe each of them.

The costs are a value, :class:`~lightning_gpipe.core.plan.ModelProfile`: measured one layer at a
time on the device that is to run it, or counted on the meta device.
"""

from lightning_gpipe.core.profile.alike import kind_of
from lightning_gpipe.core.profile.layers import Subject, profile_layers
from lightning_gpipe.core.profile.meters import intra_op_threads
from lightning_gpipe.core.profile.optimizers import Optimizers, optimizer_bytes
from lightning_gpipe.core.profile.walk import change_tensors, following, walk, walk_program

__all__ = [
    "Optimizers",
    "Subject",
    "change_tensors",
    "following",
    "intra_op_threads",
    "kind_of",
    "optimizer_bytes",
    "profile_layers",
    "walk",
    "walk_program",
]
