"""The state of the caller's thread that must stay the same while its forward loops over blocks.

All blocks run in one call of the pipeline, under one grad mode and one autocast. A forward that
computes some blocks without gradients, or in another precision, would silently get others.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor


class ThreadState(NamedTuple):
    """What decides how blocks compute, as it is on the calling thread.

    Attributes:
        grad: Whether gradients are recorded.
        inference: Whether inference mode is on.
        autocast: The type of autocast, False without it; for the CPU, and the device if it is
            another one.
        hooks: The innermost hooks on saved tensors, but those of ``torch.utils.checkpoint``: a
            stage recomputes by itself.
    """

    grad: bool
    inference: bool
    autocast: Any
    hooks: Any

    @classmethod
    def now(cls, device: torch.device) -> ThreadState:
        """The state of the calling thread."""
        grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        return cls(grad, inference, _autocast(device), _hooks())

    def holds(self, device: torch.device) -> bool:
        """Whether the calling thread is in it."""
        # Piece by piece: every call of a block asks.
        grad, inference, autocast, hooks = self
        return (
            grad is torch.is_grad_enabled()
            and inference is torch.is_inference_mode_enabled()
            and autocast == _autocast(device)
            and hooks == _hooks()
        )

    def changed_to(self, other: ThreadState) -> str:
        """What differs: ``grad mode from True to False``."""
        names = {
            "grad": "grad mode",
            "inference": "inference mode",
            "autocast": "autocast",
            "hooks": "the hooks on saved tensors",
        }
        return ", ".join(
            f"{title} from {getattr(self, name)} to {getattr(other, name)}"
            for name, title in names.items()
            if getattr(self, name) != getattr(other, name)
        )


def _autocast(device: torch.device) -> Any:
    cpu = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu")
    kind = device.type
    if kind == "cpu" or kind == "meta":
        return cpu
    return cpu, torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)


def _hooks() -> Any:
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None or _is_checkpoint(hooks) else hooks


def unchecked() -> AbstractContextManager[Any]:
    """A ``with`` block in which ``torch.utils.checkpoint`` does not take what autograd saves.

    One around the last block would run that block again in backward, outside of its pipeline.
    """
    if not _is_checkpoint(torch._C._autograd._top_saved_tensors_default_hooks(True)):
        return nullcontext()
    # Hooks cannot be removed, only overridden by hooks that do what autograd does without any.
    return torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda tensor: tensor)


def _is_checkpoint(hooks: Any) -> bool:
    return getattr(hooks and hooks[0], "__module__", None) == "torch.utils.checkpoint"
