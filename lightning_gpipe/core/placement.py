"""Puts modules on devices without ever having all of a large model on one of them.

Parameters stay the same objects, so an optimizer that holds them keeps working. A module that was
built on the ``meta`` device gets its memory here, directly on the device where it belongs.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

import torch
from torch import Tensor, nn


def place(module: nn.Module, device: torch.device) -> None:
    """Move ``module`` to ``device``; what of it is on meta is created there and initialised.

    Raises:
        TypeError: If a module with parameters on meta has no ``reset_parameters()``.
    """
    for each in module.modules():
        if _direct_on_meta(each):
            if not callable(getattr(each, "reset_parameters", None)):
                raise TypeError(
                    "a module built on the meta device must have reset_parameters() to initialise "
                    f"it: got {type(each).__name__} without. Write one, or build it on the CPU."
                )
            each.to_empty(device=device, recurse=False)
            each.reset_parameters()  # type: ignore[operator]  # callable: checked above
    module.to(device)


def place_around(root: nn.Module, inner: nn.Module, device: torch.device) -> None:
    """Move all of ``root`` except ``inner`` to ``device``."""
    if root is inner:
        return
    if not any(module is inner for module in root.modules()):
        place(root, device)
        return
    for child in root.children():
        place_around(child, inner, device)
    move: Callable[[Tensor], Tensor] = lambda tensor: tensor.to(device)  # noqa: E731
    root._apply(move, recurse=False)


def on_meta(module: nn.Module) -> bool:
    """Whether any parameter or buffer of ``module`` has no memory yet."""
    return any(_direct_on_meta(each) for each in module.modules())


def _direct_on_meta(module: nn.Module) -> bool:
    own = chain(module._parameters.values(), module._buffers.values())
    return any(tensor is not None and tensor.is_meta for tensor in own)
