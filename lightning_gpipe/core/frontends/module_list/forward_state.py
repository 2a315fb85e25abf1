"""The state of the caller's thread that must not change while its forward loops over blocks.

All blocks run in one call of the pipeline, under one grad mode and one autocast. A forward that
computes some blocks without gradients, or in another precision, would silently get others.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from lightning_gpipe.core.faithful import saved_tensors_hooks


class ForwardState(NamedTuple):
    """The thread-local settings that decide how blocks compute.

    Attributes:
        grad: Whether gradients are recorded.
        inference: Whether inference mode is on.
        autocast: The type of autocast, False without it; for the CPU, and the device if it is
            another one.
        hooks: The innermost hooks on saved tensors, except those of ``torch.utils.checkpoint``: a
            stage recomputes by itself.
    """

    grad: bool
    inference: bool
    autocast: Any
    hooks: Any

    @classmethod
    def now(cls, device: torch.device) -> ForwardState:
        grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        return cls(grad, inference, _autocast(device), saved_tensors_hooks())

    def check(self, device: torch.device, line: str) -> None:
        """Refuse a thread that is in another state at a line of the user's code."""
        now = ForwardState.now(device)
        if self == now:
            return
        names = ("grad mode", "inference mode", "autocast", "the hooks on saved tensors")
        changed = ", ".join(
            f"{name} from {before} to {after}"
            for name, before, after in zip(names, self, now, strict=True)
            if before != after
        )
        raise RuntimeError(
            "all blocks of a pipeline run in the same state of the thread: at "
            f"{line} it changes {changed}. Set it around the whole model, or within a block. A "
            "torch.utils.checkpoint around blocks is not needed, since the pipeline has "
            "activation_checkpointing: leave it out, or write use_reentrant=False."
        )


def _autocast(device: torch.device) -> Any:
    cpu = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu")
    kind = device.type
    if kind in ("cpu", "meta"):
        return cpu
    return cpu, torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
