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
        autocast: For the CPU and the device, whether autocast is on, and its type.
        hooks: The innermost hooks on saved tensors, but those of ``torch.utils.checkpoint``: a
            stage recomputes by itself.
    """

    grad: bool
    inference: bool
    autocast: tuple[Any, ...]
    hooks: Any

    @classmethod
    def now(cls, device: torch.device) -> ThreadState:
        """The state of the calling thread."""
        # Without functions of its own: every call of a block asks.
        autocast: tuple[Any, ...] = (
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
        )
        if device.type not in ("cpu", "meta"):
            kind = device.type
            autocast += torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if hooks is not None and _is_checkpoint(hooks):
            hooks = None
        grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        return cls(grad, inference, autocast, hooks)

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
