"""Tensors that have no value yet."""

from __future__ import annotations

from torch import Tensor


class Pending(Tensor):
    """Stands for what a pipeline will have computed; layers cannot read it while that runs."""
