"""Leaves that stand in for a module's parameters while a micro-batch runs.

A parameter's gradient must arrive once per backward, after all micro-batches, or hooks fire too
often, data parallelism breaks and ``torch.autograd.grad(loss, params)`` cannot work. So micro-batch
graphs must not end in the parameters. Taking each micro-batch's gradients with
``torch.autograd.grad`` and adding them up afterwards would do, at the price of a second set of
gradients at the peak.

A shadow is a leaf that aliases a parameter's storage and its version counter. The graphs of all
micro-batches end in the shadows, autograd itself adds the gradients up in place, one parameter at a
time, and what is in ``shadow.grad`` at the end is handed to the parameter without a copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from operator import ne

from torch import Tensor, nn


class Slots:
    """The places in a number of modules where parameters are kept."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.places: list[tuple[nn.Module, str]] = [
            (module, name)
            for module in modules
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]

    def shadows(self) -> Shadows:
        """New shadows of the parameters that are in the slots now and require a gradient."""
        return Shadows(self.places)


class Shadows:
    """The shadows of one mini-batch on one stage."""

    def __init__(self, places: Iterable[tuple[nn.Module, str]]) -> None:
        self._of: dict[nn.Parameter, nn.Parameter] = {}
        self._swaps: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]] = []
        for module, name in places:
            parameter = module._parameters.get(name)
            if parameter is not None and parameter.requires_grad:
                if parameter not in self._of:
                    self._of[parameter] = nn.Parameter(parameter.detach())
                self._swaps.append((module._parameters, name, self._of[parameter]))
        self._versions = [shadow._version for shadow in self._of.values()]

    @property
    def parameters(self) -> Iterable[nn.Parameter]:
        """The parameters that have a shadow."""
        return self._of.keys()

    @contextmanager
    def cast(self) -> Iterator[None]:
        """Put the shadows in the parameters' places for the duration of a ``with`` block."""
        found = [slots[name] for slots, name, _ in self._swaps]
        for slots, name, shadow in self._swaps:
            slots[name] = shadow
        try:
            yield
        finally:
            for (slots, name, _), parameter in zip(self._swaps, found, strict=True):
                slots[name] = parameter

    @property
    def edited(self) -> bool:
        """Whether a parameter was edited in place since the shadows were made."""
        now = (shadow._version for shadow in self._of.values())
        return any(map(ne, self._versions, now))

    def take_gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """The sum of the parameter's gradients, given away: the shadow forgets it."""
        shadow = self._of.get(parameter)
        if shadow is None:
            return None
        gradient, shadow.grad = shadow.grad, None
        return gradient
