"""Runs a block without lasting effects: only its result is of interest."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import nn
from typing_extensions import override

from lightning_gpipe.core.data import receiving
from lightning_gpipe.core.faithful import RECOMPUTING, Journal, ModuleState, RandomState
from lightning_gpipe.core.frontends.module_list.blocks import running
from lightning_gpipe.core.layout import tensors_within


class WithoutEffects(ExitStack):
    """Restores the state of modules and of random number generators at the end of a ``with`` block.

    The modules, and all within them, run without gradients, as in a recomputation:
    :func:`~lightning_gpipe.is_recomputing` returns True. They draw on the device and on the CPU.
    """

    # A class: see Note [Context managers are classes].

    def __init__(self, modules: Iterable[nn.Module], device: torch.device) -> None:
        super().__init__()
        self._modules = tuple(inner for module in modules for inner in module.modules())
        self._device = device

    @override
    def __enter__(self) -> Self:
        self.callback(torch.clear_autocast_cache)  # its copies of weights have no graph
        self.callback(RandomState.capture([self._device]).restore)
        self.callback(ModuleState.capture(self._modules, parameters=True).restore)
        self.callback(RECOMPUTING.reset, RECOMPUTING.set(True))
        # The parameters on another device, of a stage that shares them.
        elsewhere = [
            (module._parameters, name, p)
            for module in self._modules
            for name, p in module._parameters.items()
            if p is not None and not p.is_meta and p.device != self._device
        ]
        copies = {p: _on(p, self._device) for _, _, p in elsewhere}
        moved = Journal().changed([(slots, name, copies[p]) for slots, name, p in elsewhere])
        # Warnings, and loss terms, come again when the pipeline runs.
        no_warnings, no_terms = warnings.catch_warnings(), receiving(lambda term: None)
        for manager in (moved, running(), torch.no_grad(), no_terms, no_warnings):
            self.enter_context(manager)
        warnings.simplefilter("ignore")
        return self


def _on(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    with torch.no_grad():
        moved = parameter.to(device)  # a quantised one keeps its class
    if isinstance(moved, nn.Parameter):
        return moved
    return nn.Parameter(moved, parameter.requires_grad)


def deep_copy(value: Any) -> Any:
    """Return a deep copy of an object, with its tensors detached."""
    return copy.deepcopy(value, {id(x): x.detach().clone() for x in tensors_within(value)})


def fingerprint(value: Any) -> list[tuple[int, int]]:
    """Return a value that differs after an object got tensors, or its tensors were edited."""
    return [(id(x), 0 if x.is_inference() else x._version) for x in tensors_within(value)]
