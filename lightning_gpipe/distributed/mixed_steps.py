"""Optimizers of shards and of whole tensors, which PyTorch's functions for lists do not mix.

On GPUs an optimizer steps all parameters of a group by such functions, unless told otherwise. They
refuse DTensors and other tensors together, as of a model only some of whose layers are divided. So
a group that has both is stepped one parameter after another. Its option is as before after a step,
since checkpoints have it.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle


def step_one_by_one(optimizer: Optimizer) -> list[RemovableHandle]:
    """Step mixed groups one by one, unless the user chose a way; return the hooks' handles."""
    changed: list[dict[str, Any]] = []

    def begin(*_: Any) -> None:
        for group in optimizer.param_groups:
            chosen = group.get("foreach", True) is not None or group.get("fused")
            if not chosen and len({isinstance(x, DTensor) for x in group["params"]}) > 1:
                group["foreach"] = False
                changed.append(group)

    def end(*_: Any) -> None:
        while changed:
            changed.pop()["foreach"] = None

    pre, post = optimizer.register_step_pre_hook(begin), optimizer.register_step_post_hook(end)
    return [pre, post]
