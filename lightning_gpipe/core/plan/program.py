"""A program: what the stages run if that is more than one layer after another.

A module whose forward loops over blocks, or calls its children in any order, is a list of steps:
the calls that its forward makes, in order, each on values that the caller gave or an earlier step
made. Every step belongs to a stage, and none needs a value of a later stage::

    %0 <- caller
    %1 <- caller
    %2 <- stage 0: blocks.0(%0, mask=%1)
    %3 <- stage 0: blocks.1(%2, mask=%1)
    %4 <- stage 1: blocks.2(%3, mask=%1)
    caller <- %4

From this follows what travels. A value goes to the next stage with the micro-batch: here %3. To any
other stage, and between the caller and the middle of the pipeline, it goes straight, by a route, as
a skip tensor does: here %1 to stage 1. All values from one place to another one go by one route. A
stage drops a value after the last step that needs it.

The program of one mini-batch may differ from that of the next, so it is given with the mini-batch.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lightning_gpipe.core.plan.function import Function
from lightning_gpipe.core.plan.route import CALLER, Route, Values
from lightning_gpipe.core.plan.step import Step


@dataclass(frozen=True, eq=False)
class Part:
    """The steps of one stage, and what they need and leave.

    Attributes:
        steps: The steps, in order.
        takes: The values that come with the micro-batch, in order.
        gives: Those that go to the next stage with it; for the last stage, its outputs.
        arriving: The routes of values from other places than the previous stage.
        leaving: The routes of values to other places than the next stage.
        drops: For each step, the values that nothing needs after it.
    """

    steps: tuple[Step, ...]
    takes: tuple[int, ...]
    gives: tuple[int, ...]
    arriving: tuple[Route, ...]
    leaving: tuple[Route, ...]
    drops: tuple[tuple[int, ...], ...]

    @cached_property
    def signature(self) -> tuple[Any, ...]:
        """Equal for parts that make the same calls on the same values."""
        calls = tuple((step.name, step.value, step.needs) for step in self.steps)
        return calls, self.takes, self.gives, self.arriving, self.leaving

    @cached_property
    def function(self) -> Function:
        """The steps as one function of what comes with the micro-batch and by routes."""
        return Function(
            self.steps,
            self.drops,
            takes=self.takes,
            arriving=[route.numbers for route in self.arriving],
            gives=self.gives,
            leaving=[route.numbers for route in self.leaving],
        )


class Program:
    """Steps in order, and what travels between their stages.

    Args:
        steps: The steps, in order of their calls.
        inputs: The numbers of the values that the caller gives.
        outputs: The numbers of the values that the caller gets.
        n: The number of stages.

    Attributes:
        inputs, outputs, n: As given.
        parts: The part of each stage.

    Raises:
        ValueError: If a step needs a value that no earlier step of its stage or an earlier one
            makes.
    """

    def __init__(
        self, steps: Sequence[Step], *, inputs: Sequence[int], outputs: Sequence[int], n: int
    ) -> None:
        self.inputs, self.outputs, self.n = tuple(inputs), tuple(outputs), n
        self._steps = sorted(steps, key=lambda step: step.stage)  # stable: in order within a stage
        self._made = dict.fromkeys(self.inputs, CALLER) | {s.value: s.stage for s in steps}
        self._check()
        self._ways = self._travels()
        self.parts = tuple(self._part(j) for j in range(n))

    @property
    def first(self) -> tuple[int, ...]:
        """The inputs that stage 0 needs: what a micro-batch is at first."""
        return self.parts[0].takes

    @cached_property
    def given(self) -> tuple[Route, ...]:
        """The routes of inputs to later stages."""
        return tuple(self._routes((CALLER, j) for j in range(1, self.n)))

    @cached_property
    def returned(self) -> tuple[Route, ...]:
        """The routes of outputs that earlier stages than the last make."""
        return tuple(self._routes((j, self.n) for j in range(self.n - 1)))

    @cached_property
    def fingerprint(self) -> int:
        """Differs, almost surely, from that of a program with other steps or values."""
        steps = [(step.value, step.stage, sorted(step.needs)) for step in self._steps]
        return zlib.crc32(repr((self.inputs, self.outputs, steps)).encode())

    def title_of(self, number: int) -> str:
        """What errors call the step that makes a value."""
        return next(step.title for step in self._steps if step.value == number)

    def __str__(self) -> str:
        lines = [f"%{each} <- caller" for each in self.inputs]
        lines += map(str, self._steps)
        return "\n".join([*lines, f"caller <- {', '.join(f'%{each}' for each in self.outputs)}"])

    def _check(self) -> None:
        known = set(self.inputs)
        for step in self._steps:
            if missing := sorted(step.needs - known):
                raise ValueError(
                    "a step must need values that the caller gives, or earlier steps of its stage "
                    f"or of an earlier one: got {step}, before %{missing[0]} is made."
                )
            known.add(step.value)
        if missing := sorted(set(self.outputs) - set(self._made)):
            raise ValueError(f"outputs must be made by steps: got %{missing[0]}, made by none.")
        if given := sorted(set(self.outputs) & set(self.inputs)):
            raise ValueError(f"outputs must be made by steps: got %{given[0]}, an input.")

    def _travels(self) -> dict[tuple[int, int], tuple[int, ...]]:
        """For each place and each later one that needs values made there, these values."""
        used: dict[int, set[int]] = {number: set() for number in self._made}
        for step in self._steps:
            for number in step.needs:
                used[number].add(step.stage)
        for number in self.outputs:
            used[number].add(self.n)
        ways: dict[tuple[int, int], list[int]] = {}
        for number, targets in used.items():
            for target in targets - {self._made[number]}:
                ways.setdefault((self._made[number], target), []).append(number)
        return {way: tuple(numbers) for way, numbers in ways.items()}

    def _part(self, j: int) -> Part:
        steps = tuple(step for step in self._steps if step.stage == j)
        takes, gives = self._ways.get((j - 1, j), ()), self._ways.get((j, j + 1), ())
        arriving = tuple(self._routes((source, j) for source in range(CALLER, j - 1)))
        leaving = tuple(self._routes((j, target) for target in range(j + 2, self.n + 1)))
        held = {*takes, *(number for route in arriving for number in route.numbers)}
        kept = {*gives, *(number for route in leaving for number in route.numbers)}
        return Part(steps, takes, gives, arriving, leaving, tuple(_drops(steps, held, kept)))

    def _routes(self, ways: Iterable[tuple[int, int]]) -> Iterator[Route]:
        """The routes of those ways that values go."""
        for way in ways:
            if way in self._ways:
                yield Route(Values(self._ways[way]), *way)


def _drops(
    steps: Sequence[Step], held: Iterable[int], kept: Iterable[int]
) -> Iterator[tuple[int, ...]]:
    """For each step the values that are needed no more after it."""
    last = dict.fromkeys(held, 0)
    for k, step in enumerate(steps):
        last |= dict.fromkeys([*step.needs, step.value], k)
    for number in kept:
        last.pop(number, None)
    for k in range(len(steps)):
        yield tuple(number for number, at in last.items() if at == k)
