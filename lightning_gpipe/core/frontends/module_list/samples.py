"""The values of a recording for a few rows, computed when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
from lightning_gpipe.core.frontends.module_list.calls import Call
from lightning_gpipe.core.frontends.module_list.effects import Undisturbed, copied
from lightning_gpipe.core.frontends.module_list.expected import is_plain
from lightning_gpipe.core.frontends.module_list.results import TensorLeaf
from lightning_gpipe.core.frontends.module_list.tape import Tape
from lightning_gpipe.core.plan import Step, Value, is_own

# Runs a function for a stage; returns what it returns, in all processes.
Rehearse = Callable[[int, Callable[[], Any]], Any]

_SHAPES = 1000  # that are remembered of a kind


def only_here(stage: int, function: Callable[[], Any]) -> Any:
    """What the function returns: for a pipeline in one process."""
    return function()


def few_of(tensor: Tensor, reading: Reading, rows: int, few: int | None) -> Tensor:
    """A few rows of a tensor; all of one that is not cut, or if ``few`` is None."""
    tensor = tensor.detach()
    if reading == WHOLE or few is None:
        return tensor
    # The last ones: a block may take the first entries of a table, and must not get the same ones
    # of a table that is cut.
    chosen = [(k - few) % rows for k in range(few)]
    return tensor.unflatten(0, (rows, reading))[chosen].flatten(0, 1)


class Samples:
    """The values of one recording for a few of its rows.

    Args:
        tape: What was recorded; it may grow.
        inputs: The tensors from outside by number, and how they are cut.
        rows: The number of rows.
        rehearse: Runs calls of a stage, for all processes.

    Attributes:
        tape: As given.
        few: How many rows are computed; None for all.
    """

    def __init__(
        self,
        tape: Tape,
        inputs: Mapping[int, tuple[Tensor, Reading]],
        rows: int,
        rehearse: Rehearse = only_here,
    ) -> None:
        self.tape = tape
        self._inputs, self._rows, self._rehearse = inputs, rows, rehearse
        self.few: int | None = None
        if rows > 1:
            self.few = 3 if rows == 2 else 2  # so that a tensor given whole does not fit
        self._known: dict[int, Any] = {}
        self._alike: dict[Any, Any] = {}

    def __getitem__(self, number: int) -> Any:
        if number not in self._known:
            self._known[number] = self._made(number)
        return self._known[number]

    def __setitem__(self, number: int, value: Any) -> None:
        self._known[number] = value
        if number in self.tape.calls:
            self._alike[self._kind(number)] = value

    def shape_of(self, number: int) -> torch.Size:
        """The shape of a value for the whole mini-batch."""
        if number in self._inputs:
            return self._inputs[number][0].shape
        if number not in self.tape.picked:  # made of an input
            return self._scaled(self[number].shape, 1)
        source, k = self.tape.picked[number]
        _, learned = self.tape.calls[source]
        step = self.tape.steps[source]
        leaves = leaves_in((step.args, dict(step.kwargs)))
        given = tuple(
            self.shape_of(x.number) if isinstance(x, Value) else repr(x) if is_plain(x) else None
            for _, x in leaves
        )
        if given not in learned.shapes:
            if len(learned.shapes) >= _SHAPES:
                learned.shapes.clear()
            sample = self[source]
            values = [sample] if learned.result.single else sample
            pairs = zip(values, learned.result.leaves, strict=True)
            learned.shapes[given] = [
                self._scaled(x.shape, leaf.reading) if isinstance(leaf, TensorLeaf) else None
                for x, leaf in pairs
            ]
        found = learned.shapes[given][k]
        assert found is not None, "placeholders stand for tensors"
        return found

    def take_all(self) -> None:
        """Compute all rows from now on."""
        self.few = None
        self.clear()

    def clear(self) -> None:
        """Forget all values."""
        self._known, self._alike = {}, {}

    def _made(self, number: int) -> Any:
        if number in self._inputs:
            tensor, reading = self._inputs[number]
            # What has several entries per row is given by rows: see Recording.
            return few_of(tensor, min(reading, 1), self._rows, self.few)
        step = self.tape.steps[number]
        if number not in self.tape.calls:
            return step({each: self[each] for each in step.needs})
        kind = self._kind(number)
        if kind not in self._alike:
            self._alike[kind] = self._run(step, self.tape.calls[number][0])
        return self._alike[kind]

    def _run(self, step: Step, call: Call) -> Any:
        def given(path: Path, leaf: Any) -> Any:
            if isinstance(leaf, Value):
                return self[leaf.number].to(call.device, copy=True)
            return copied(leaf) if is_own(leaf) else leaf

        args, kwargs = mapped(given, (step.args, dict(step.kwargs)))

        def run() -> Any:
            with Undisturbed(call.modules, call.device):
                result = step.run(*args, **kwargs)
                return result if step.then is None else step.then(result)

        return self._rehearse(call.stage, run)

    def _kind(self, number: int) -> tuple[int, tuple[torch.Size, ...]]:
        """Equal for calls that return values of the same shapes."""
        step = self.tape.steps[number]
        leaves = (leaf for _, leaf in leaves_in((step.args, dict(step.kwargs))))
        shapes = tuple(self[leaf.number].shape for leaf in leaves if isinstance(leaf, Value))
        return id(self.tape.calls[number][1]), shapes

    def _scaled(self, shape: torch.Size, reading: Reading | None) -> torch.Size:
        if not reading or self.few is None:
            return shape
        return torch.Size([reading * self._rows, *shape[1:]])
