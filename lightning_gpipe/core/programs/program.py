"""A program: the calls that the stages run.

The forward of a module is a list of steps: the calls that it makes, in order, each on inputs and
results of earlier steps. Every step belongs to a stage, and none needs a value of a later stage::

    %0 <- caller
    %1 <- caller
    %2 <- stage 0: blocks.0(%0, mask=%1)
    %3 <- stage 0: blocks.1(%2, mask=%1)
    %4 <- stage 1: blocks.2(%3, mask=%1)
    caller <- %4

The routes of values follow from this. A value goes to the next stage with the micro-batch: here %3.
To any other stage, and between the caller and the middle of the pipeline, it goes straight, by a
route, as a skip tensor does: here %1 to stage 1. All values from one place to another one go by one
route. A stage drops a value after the last step that needs it.

Each mini-batch comes with its program, since that of the next one may differ. An nn.Sequential is
the simplest one, see :func:`chain`.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import nn

from lightning_gpipe.core.programs.route import Route, Value, Values
from lightning_gpipe.core.programs.step import Function, Step
from lightning_gpipe.core.schedules import CALLER


@dataclass(eq=False)
class Part:
    """The steps of one stage, with the values that they need and leave.

    Attributes:
        takes: The values that come with the micro-batch, in order.
        gives: The values that go to the next stage with it; for the last stage, the outputs.
        drops: For each step, the values that nothing needs after it.
        runs: The number of mini-batches that ran it.
    """

    steps: tuple[Step, ...]
    takes: tuple[int, ...]
    gives: tuple[int, ...]
    arriving: tuple[Route, ...]
    leaving: tuple[Route, ...]
    drops: tuple[tuple[int, ...], ...]
    runs: int = 0

    def call(self, values: Mapping[int, Any]) -> dict[int, Any]:
        """Make the calls one by one, with the values of these numbers; return those they make."""
        by_number = dict(values)
        for step in self.steps:
            by_number[step.value] = step(by_number)
        return {step.value: by_number[step.value] for step in self.steps}

    @cached_property
    def signature(self) -> str:
        """A text that is equal for parts that make the same calls on the same values."""
        calls = [(step.name, step.value, sorted(step.needs)) for step in self.steps]
        return repr((calls, self.takes, self.gives, self.arriving, self.leaving))

    @cached_property
    def function(self) -> Function:
        inputs = [self.takes, *(route.numbers for route in self.arriving)]
        outputs = [self.gives, *(route.numbers for route in self.leaving)]
        return Function(self.steps, self.drops, inputs, outputs)


class Program:
    """Steps in order of their calls, and the routes of values between their ``n`` stages.

    ``inputs`` and ``outputs`` are the numbers of the values that the caller gives and gets;
    ``stages`` are those of the module, all but in a chain of several modules.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        *,
        inputs: Sequence[int],
        outputs: Sequence[int],
        n: int,
        stages: range | None = None,
    ) -> None:
        self.inputs, self.outputs, self.n = tuple(inputs), tuple(outputs), n
        self.stages = range(n) if stages is None else stages
        self._steps = sorted(steps, key=lambda step: step.stage)  # stable: in order within a stage
        self._makers = dict.fromkeys(self.inputs, CALLER) | {s.value: s.stage for s in steps}
        self._check()
        self._values = self._values_between()
        self.parts = tuple(self._part(j) for j in range(n))

    def moved(self, first: int, n: int) -> Program:
        """Return this program in stages from ``first`` on of a pipeline of ``n``; of its own, 0."""
        if n in (0, self.n):
            return self
        steps = [replace(step, stage=step.stage + first) for step in self._steps]
        stages = range(first, first + self.n)
        return Program(steps, inputs=self.inputs, outputs=self.outputs, n=n, stages=stages)

    @property
    def first(self) -> tuple[int, ...]:
        return self.parts[0].takes

    @cached_property
    def given(self) -> tuple[Route, ...]:
        return tuple(self._routes((CALLER, j) for j in range(1, self.n)))

    @cached_property
    def returned(self) -> tuple[Route, ...]:
        return tuple(self._routes((j, self.n) for j in range(self.n - 1)))

    @cached_property
    def fingerprint(self) -> int:
        steps = [(step.value, step.stage, sorted(step.needs)) for step in self._steps]
        return zlib.crc32(repr((self.inputs, self.outputs, steps)).encode())

    @cached_property
    def checksum(self) -> int:
        """The fingerprint, with the constants among the arguments of the steps."""
        constants = [step.constants for step in self._steps]
        return zlib.crc32(repr(constants).encode(), self.fingerprint)

    def title_of(self, number: int) -> str:
        return next(step.title for step in self._steps if step.value == number)

    def __str__(self) -> str:
        lines = [f"%{number} <- caller" for number in self.inputs]
        lines += map(str, self._steps)
        lines.append(f"caller <- {', '.join(f'%{number}' for number in self.outputs)}")
        return "\n".join(lines)

    def _check(self) -> None:
        values = set(self.inputs)
        for step in self._steps:
            if missing := sorted(step.needs - values):
                raise ValueError(
                    "a step must need values that the caller gives, or earlier steps of its stage "
                    f"or of an earlier one: got {step}, before %{missing[0]} is made."
                )
            values.add(step.value)
        if missing := sorted(set(self.outputs) - set(self._makers)):
            raise ValueError(f"outputs must be made by steps: got %{missing[0]}, made by none.")
        if unchanged := sorted(set(self.outputs) & set(self.inputs)):
            raise ValueError(f"outputs must be made by steps: got %{unchanged[0]}, an input.")

    def _values_between(self) -> dict[tuple[int, int], tuple[int, ...]]:
        users: dict[int, set[int]] = {number: set() for number in self._makers}
        for step in self._steps:
            for number in step.needs:
                users[number].add(step.stage)
        for number in self.outputs:
            users[number].add(self.n)
        values: dict[tuple[int, int], list[int]] = {}
        for number, targets in users.items():
            for target in targets - {self._makers[number]}:
                values.setdefault((self._makers[number], target), []).append(number)
        return {way: tuple(numbers) for way, numbers in values.items()}

    def _part(self, j: int) -> Part:
        steps = tuple(step for step in self._steps if step.stage == j)
        takes, gives = self._values.get((j - 1, j), ()), self._values.get((j, j + 1), ())
        arriving = tuple(self._routes((source, j) for source in range(CALLER, j - 1)))
        leaving = tuple(self._routes((j, target) for target in range(j + 2, self.n + 1)))
        inputs = {*takes, *(number for route in arriving for number in route.numbers)}
        outputs = {*gives, *(number for route in leaving for number in route.numbers)}
        return Part(steps, takes, gives, arriving, leaving, tuple(_drops(steps, inputs, outputs)))

    def _routes(self, ways: Iterable[tuple[int, int]]) -> Iterator[Route]:
        for way in ways:
            if way in self._values:
                yield Route(Values(self._values[way]), *way)


def chain(layers: Iterable[Iterable[tuple[nn.Module, str]]]) -> Program:
    """Return the program of the layers of each stage, one after another, with titles for errors."""
    staged = [(j, *layer) for j, stage in enumerate(layers) for layer in stage]
    steps = [
        Step(layer, (Value(k),), k + 1, j, name=name) for k, (j, layer, name) in enumerate(staged)
    ]
    return Program(steps, inputs=[0], outputs=[len(steps)], n=staged[-1][0] + 1)


def _drops(
    steps: Sequence[Step], inputs: Iterable[int], outputs: Iterable[int]
) -> Iterator[tuple[int, ...]]:
    """Yield for each step the values that nothing needs after it."""
    last = dict.fromkeys(inputs, 0)
    for k, step in enumerate(steps):
        last |= dict.fromkeys([*step.needs, step.value], k)
    for number in outputs:
        last.pop(number, None)
    for k in range(len(steps)):
        yield tuple(number for number, at in last.items() if at == k)
