"""Runs layers one by one on a whole batch, to observe each of them.

A verification compares what they return; their cost can be measured in the same way.
"""

from lightning_gpipe.core.profile.walk import change_tensors, following, walk, walk_program

__all__ = [
    "change_tensors",
    "following",
    "walk",
    "walk_program",
]
