"""Runs a block without lasting effects: only its result is of interest."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_gpipe.core.data import receiving
from lightning_gpipe.core.faithful import (
    RECOMPUTING,
    Bracket,
    Journal,
    LazyManagers,
    Manager,
    drawing_by_default,
    preserved,
)
from lightning_gpipe.core.frontends.module_list.blocks import running
from lightning_gpipe.core.layout import tensors_within


def without_effects(modules: Iterable[nn.Module], device: torch.device) -> Manager:
    """Restore the state of modules and of random number generators at the end of a ``with`` block.

    The modules, and all within them, run without gradients, as in a recomputation:
    :func:`~lightning_gpipe.is_recomputing` returns True. They draw on the device and on the CPU.
    """
    inner = tuple(within for module in modules for within in module.modules())

    def managers() -> Iterator[Manager]:
        yield preserved(inner, [device], parameters=True)
        yield Bracket(partial(RECOMPUTING.set, True), RECOMPUTING.reset)
        # The parameters on another device, of a stage that shares them.
        elsewhere = [
            (module._parameters, name, p)
            for module in inner
            for name, p in module._parameters.items()
            if p is not None and not p.is_meta and p.device != device
        ]
        copies = {p: _on(p, device) for _, _, p in elsewhere}
        yield Journal().changed([(slots, name, copies[p]) for slots, name, p in elsewhere])
        yield drawing_by_default()  # whose states are restored, in this process alone
        yield running()
        yield torch.no_grad()
        # Warnings, and loss terms, come again when the pipeline runs.
        yield receiving(lambda term: None)
        yield warnings.catch_warnings(action="ignore")

    return LazyManagers(managers)


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
