"""What single layers do: run one by one, on a whole batch, where something is to be seen of each.

A verification compares what they return; what they cost is measured in the same way.
"""

from lightning_gpipe.core.profile.walk import change_tensors, walk

__all__ = [
    "change_tensors",
    "walk",
]
