"""Gradients of parameters of which each process has some only.

A norm is that of all gradients, and an infinity in any of them skips the step of all. The numbers
are those of one process: a norm is made of those of the single parameters, in their order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from lightning.pytorch.plugins import MixedPrecision, Precision
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_gpipe.processes.group import Group


class ClippedTogether:
    """Clips by the norm of the gradients of all processes; stands in for a method of a plugin.

    Args:
        plugin: The precision plugin.
        around: The ids of the parameters that each process has.
        group: The processes.
    """

    def __init__(self, plugin: Precision, around: set[int], group: Group) -> None:
        self._plugin = plugin
        self._around = around
        self._group = group

    def __call__(self, optimizer: Optimizer, clip_val: float) -> None:
        parameters = list(self._plugin.main_params(optimizer))
        total = total_norm(parameters, self._around, self._group)
        torch.nn.utils.clip_grads_with_norm_(parameters, clip_val, total)


def total_norm(parameters: Iterable[nn.Parameter], around: set[int], group: Group) -> Tensor:
    """The norm of the gradients of all processes.

    Args:
        parameters: Those of all stages, in the same order in each process.
        around: The ids of those that each process has.
        group: The processes.
    """
    parameters = list(parameters)
    norms = torch.zeros(2, len(parameters), dtype=torch.float64)  # and whether there is one
    dtype = torch.float32
    for k, parameter in enumerate(parameters):
        dtype = parameter.dtype if k == 0 else torch.promote_types(dtype, parameter.dtype)
        if parameter.grad is not None and (group.rank == 0 or id(parameter) not in around):
            norm = torch.linalg.vector_norm(parameter.grad)
            norms[:, k] = torch.tensor([float(norm), 1.0], dtype=torch.float64)
    found, there = group.sum(norms)
    return torch.linalg.vector_norm(found[there > 0].to(dtype))


class UnscaledTogether:
    """Finds infinities in the gradients of all processes; stands in for a method of a scaler.

    Args:
        scaler: The gradient scaler.
        group: The processes.
    """

    def __init__(self, scaler: torch.amp.GradScaler, group: Group) -> None:
        self._scaler = scaler
        self._unscale = scaler._unscale_grads_
        self._group = group

    def __call__(self, *args: Any, **kwargs: Any) -> dict[torch.device, Tensor]:
        found = self._unscale(*args, **kwargs)
        infinite = self._group.decide(any(bool(each) for each in found.values()), all=False)
        if not found:  # a process may have no parameters
            assert self._scaler._scale is not None, "a loss was scaled"
            found = {self._scaler._scale.device: torch.zeros((), device=self._scaler._scale.device)}
        for each in found.values():
            each.fill_(float(infinite))
        return found


class Together:
    """Keeps what each process has the same in all of them, while a model trains.

    The precision plugin stays the same object, for its class is a key in checkpoints.

    Args:
        group: The processes.
        around: The parameters that each process has.
        plugin: The precision plugin.
    """

    def __init__(self, group: Group, around: Sequence[nn.Parameter], plugin: Precision) -> None:
        self._group = group
        self._around = around
        self._changed: list[tuple[Any, str]] = []
        for parameter in around:
            group.overwrite(parameter)
        clip = ClippedTogether(plugin, {id(parameter) for parameter in around}, group)
        self._set(plugin, "clip_grad_by_norm", clip)
        if isinstance(plugin, MixedPrecision) and plugin.scaler is not None:
            together = UnscaledTogether(plugin.scaler, group)
            self._set(plugin.scaler, "_unscale_grads_", together)

    def equalise(self) -> None:
        """Give all processes the gradients of the first one.

        They are the same but for rounding: it depends on the number of threads.
        """
        for parameter in self._around:
            if parameter.grad is not None:
                self._group.overwrite(parameter.grad)

    def release(self) -> None:
        """Let the plugin work by itself again."""
        for owner, name in self._changed:
            vars(owner).pop(name, None)
        self._changed = []

    def _set(self, owner: Any, name: str, value: Any) -> None:
        vars(owner)[name] = value
        self._changed.append((owner, name))
