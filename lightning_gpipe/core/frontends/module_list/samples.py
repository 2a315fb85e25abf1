"""The values of a recording for a few rows, computed when they are asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_gpipe.core.frontends.module_list.arguments import (
    WHOLE,
    Path,
    Reading,
    leaves_in,
    mapped,
)
from lightning_gpipe.core.frontends.module_list.calls import Call, Learned
from lightning_gpipe.core.frontends.module_list.effects import Undisturbed, copied
from lightning_gpipe.core.plan import Step, Value, is_own


def few_of(tensor: Tensor, reading: Reading, rows: int, few: int | None) -> Tensor:
    """A few rows of a tensor; all of one that is not cut, or if ``few`` is None."""
    tensor = tensor.detach()
    if reading == WHOLE or few is None:
        return tensor
    chosen = [k % rows for k in range(few)]
    return tensor.unflatten(0, (rows, reading))[chosen].flatten(0, 1)


class Samples:
    """The values of one recording for a few of its rows.

    Args:
        steps: The recorded steps by the numbers of their results; they may grow.
        inputs: The tensors from outside by number, and how they are cut.
        calls: Of steps that are calls, what is known.
        rows: The number of rows.
        few: How many of them are computed; None for all.
    """

    def __init__(
        self,
        steps: Mapping[int, Step],
        inputs: Mapping[int, tuple[Tensor, Reading]],
        calls: Mapping[int, tuple[Call, Learned]],
        rows: int,
        few: int | None,
    ) -> None:
        self._steps, self._inputs, self._calls = steps, inputs, calls
        self._rows = rows
        self.few = few
        self._known: dict[int, Any] = {}
        self._alike: dict[Any, Any] = {}

    def __getitem__(self, number: int) -> Any:
        if number not in self._known:
            self._known[number] = self._made(number)
        return self._known[number]

    def __setitem__(self, number: int, value: Any) -> None:
        self._known[number] = value
        if number in self._calls:
            self._alike[self._kind(number)] = value

    def _made(self, number: int) -> Any:
        if number in self._inputs:
            tensor, reading = self._inputs[number]
            if self.few is not None and reading > 1:  # given by rows: see Recording
                return tensor.detach()[[k % self._rows for k in range(self.few)]]
            return few_of(tensor, reading, self._rows, self.few)
        step = self._steps[number]
        if number not in self._calls:
            return step({each: self[each] for each in step.needs})
        kind = self._kind(number)
        if kind not in self._alike:
            self._alike[kind] = self._run(step, self._calls[number][0])
        return self._alike[kind]

    def _run(self, step: Step, call: Call) -> Any:
        def given(path: Path, leaf: Any) -> Any:
            if isinstance(leaf, Value):
                return self[leaf.number].to(call.device, copy=True)
            return copied(leaf) if is_own(leaf) else leaf

        args, kwargs = mapped(given, (step.args, dict(step.kwargs)))
        with Undisturbed(call.modules, call.device):
            return step.run(*args, **kwargs)

    def _kind(self, number: int) -> tuple[int, tuple[torch.Size, ...]]:
        """Equal for calls that return values of the same shapes."""
        step = self._steps[number]
        leaves = (leaf for _, leaf in leaves_in((step.args, dict(step.kwargs))))
        shapes = tuple(self[leaf.number].shape for leaf in leaves if isinstance(leaf, Value))
        return id(self._calls[number][1]), shapes
