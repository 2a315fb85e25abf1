"""Runs a block so that nothing of it remains: only what it returned is of interest."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gpipe.core.data import receiving
from lightning_gpipe.core.faithful import (
    RECOMPUTING,
    Behavior,
    Buffers,
    LibraryGenerators,
    StageState,
    default_generator,
)
from lightning_gpipe.core.frontends.module_list.blocks import running
from lightning_gpipe.core.plan import within


class Undisturbed:
    """Undoes at the end of a ``with`` block what modules that run in it change, and what they draw.

    They run without gradients, as in a recomputation: a layer that asks
    :func:`~lightning_gpipe.is_recomputing` knows that it is not the first time.

    Args:
        modules: The modules, with all within them.
        device: Where they draw, beside the CPU.
    """

    # A class: see Note [Context managers are classes].

    def __init__(self, modules: Iterable[nn.Module], device: torch.device) -> None:
        self._modules = tuple(each for module in modules for each in module.modules())
        self._device = device
        self._generators = [default_generator(d) for d in {torch.device("cpu"), device}]
        self._library = LibraryGenerators()

    def __enter__(self) -> None:
        self._states = [generator.get_state() for generator in self._generators]
        self._drawn = self._library.get_state()
        self._snapshot = StageState(self._modules, deferred=False).snapshot(Behavior())
        # Those of batch norms too, which a recomputation does not need.
        self._buffers = Buffers(self._modules, copied=lambda slot: True)
        self._token = RECOMPUTING.set(True)
        self._elsewhere = list(self._parameters_elsewhere())
        copies = {p: _copy(p, self._device) for _, _, p in self._elsewhere}
        for module, name, parameter in self._elsewhere:
            module._parameters[name] = copies[parameter]
        # What is warned of is warned of again when it runs.
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
        self._snapshot.restore()
        self._buffers.restore()
        self._library.set_state(self._drawn)
        for generator, state in zip(self._generators, self._states, strict=True):
            generator.set_state(state)
        torch.clear_autocast_cache()  # its copies of weights have no graph

    def _parameters_elsewhere(self) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
        """Those that are with another stage, which shares them."""
        for module in self._modules:
            for name, p in module._parameters.items():
                if p is not None and not p.is_meta and p.device != self._device:
                    yield module, name, p


def _copy(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    with torch.no_grad():
        made = parameter.to(device)  # a quantised one stays what it is
    return made if isinstance(made, nn.Parameter) else nn.Parameter(made, parameter.requires_grad)


def tensors_held(value: Any, depth: int = 8) -> Iterator[Tensor]:
    """The tensors within an object, its attributes and its containers."""
    for each in within(value):
        if isinstance(each, Tensor):
            yield each
        elif depth and not isinstance(each, (type, nn.Module)):
            for held in getattr(each, "__dict__", {}).values():
                yield from tensors_held(held, depth - 1)


def copied(value: Any) -> Any:
    """A deep copy of an object, with its tensors detached."""
    return copy.deepcopy(value, {id(x): x.detach().clone() for x in tensors_held(value)})


def fingerprint(value: Any) -> list[tuple[int, int]]:
    """Differs after an object has got tensors, or those that it has were edited."""
    return [(id(x), 0 if x.is_inference() else x._version) for x in tensors_held(value)]


def _drop(_: Any) -> None:
    pass
