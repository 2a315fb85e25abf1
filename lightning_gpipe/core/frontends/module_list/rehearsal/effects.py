"""Runs a block without lasting effects: only its result is of interest."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gpipe.core.data import receiving
from lightning_gpipe.core.faithful import RECOMPUTING, ModuleState, RandomState
from lightning_gpipe.core.frontends.module_list.blocks import running
from lightning_gpipe.core.layout import within


class WithoutEffects:
    """Restores the state of modules and of random number generators at the end of a ``with`` block.

    The modules, and all within them, run without gradients, as in a recomputation:
    :func:`~lightning_gpipe.is_recomputing` returns True. They draw on the device and on the CPU.
    """

    # A class: see Note [Context managers are classes].

    def __init__(self, modules: Iterable[nn.Module], device: torch.device) -> None:
        self._modules = tuple(inner for module in modules for inner in module.modules())
        self._device = device

    def __enter__(self) -> None:
        self._random_state = RandomState.capture([self._device])
        self._state = ModuleState.capture(self._modules, parameters=True)
        self._token = RECOMPUTING.set(True)
        # The parameters on another device, of a stage that shares them.
        self._elsewhere = [
            (module, name, p)
            for module in self._modules
            for name, p in module._parameters.items()
            if p is not None and not p.is_meta and p.device != self._device
        ]
        copies = {p: _on(p, self._device) for _, _, p in self._elsewhere}
        for module, name, parameter in self._elsewhere:
            module._parameters[name] = copies[parameter]
        # Warnings come again when the pipeline runs.
        self._managers = (running(), torch.no_grad(), receiving(_drop), warnings.catch_warnings())
        for manager in self._managers:
            manager.__enter__()
        warnings.simplefilter("ignore")

    def __exit__(self, *error: Any) -> None:
        for manager in reversed(self._managers):
            manager.__exit__(*error)
        RECOMPUTING.reset(self._token)
        for module, name, parameter in self._elsewhere:
            module._parameters[name] = parameter
        self._state.restore()
        self._random_state.restore()
        torch.clear_autocast_cache()  # its copies of weights have no graph


def _on(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    with torch.no_grad():
        moved = parameter.to(device)  # a quantised one keeps its class
    if isinstance(moved, nn.Parameter):
        return moved
    return nn.Parameter(moved, parameter.requires_grad)


def tensors_within(value: Any, depth: int = 8) -> Iterator[Tensor]:
    """Yield the tensors within an object, its attributes and its containers."""
    for item in within(value):
        if isinstance(item, Tensor):
            yield item
        elif depth and not isinstance(item, (type, nn.Module)):
            for attribute in getattr(item, "__dict__", {}).values():
                yield from tensors_within(attribute, depth - 1)


def deep_copy(value: Any) -> Any:
    """Return a deep copy of an object, with its tensors detached."""
    return copy.deepcopy(value, {id(x): x.detach().clone() for x in tensors_within(value)})


def fingerprint(value: Any) -> list[tuple[int, int]]:
    """Return a value that differs after an object got tensors, or its tensors were edited."""
    return [(id(x), 0 if x.is_inference() else x._version) for x in tensors_within(value)]


def _drop(_: Any) -> None:
    pass
