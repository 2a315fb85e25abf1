"""What a stage does with a micro-batch: run its layers one after another, or steps of a program.

Either takes what came with the micro-batch and by routes, and leaves what goes on with it and by
routes. Values on a route are in a table, by the name of the route; so are skip tensors, which the
layers themselves take out and put in.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import Any

from typing_extensions import override

from lightning_gpipe.core.data import FlatTree, join, tree_flatten
from lightning_gpipe.core.faithful import MutationGuard, add_note
from lightning_gpipe.core.plan import Part, Program, Route, Step, Value
from lightning_gpipe.core.run.stage import Stage
from lightning_gpipe.core.skip import Table


class Work(ABC):
    """What a stage does with a micro-batch.

    Attributes:
        arriving: The routes to the stage, in the order of what arrives.
        leaving: The routes from it, in the order of what leaves.
        signature: Equal for work that makes the same calls.
        tabled: Whether it needs a table of its own.
    """

    arriving: tuple[Route, ...]
    leaving: tuple[Route, ...]
    signature: Hashable
    tabled: bool

    @abstractmethod
    def run(self, x: Any, table: Table, guard: MutationGuard) -> FlatTree:
        """Do it.

        Args:
            x: What came with the micro-batch.
            table: What came by routes; afterwards what leaves by routes.
            guard: Notices edits of ``x`` in place, and is told what may have made one.

        Returns:
            What goes on with the micro-batch.
        """


class Layers(Work):
    """The layers of a stage, each on what the previous one returned.

    Args:
        stage: The stage.
    """

    def __init__(self, stage: Stage) -> None:
        self.arriving, self.leaving = stage.arriving, stage.leaving
        self.signature = None
        self.tabled = stage.skips
        self._layers = stage.titled

    @override
    def run(self, x: Any, table: Table, guard: MutationGuard) -> FlatTree:
        after = guard.after
        for layer, title in self._layers:
            x = layer(x)
            after(title)
        return tree_flatten(x)


class Steps(Work):
    """The steps of one stage of a program.

    Args:
        stage: The stage.
        part: Its part of the program.
    """

    def __init__(self, stage: Stage, part: Part) -> None:
        self.arriving = (*stage.arriving, *part.arriving)
        self.leaving = (*stage.leaving, *part.leaving)
        self.signature = part.signature
        self.tabled = bool(stage.skips or self.arriving or self.leaving)
        self._part = part
        self._again = next(part.uses) > 0  # it is worth while to make a function of it
        self._title = str(stage)
        self._arriving = [each.number for each in part.arriving]
        self._leaving = [each.number for each in part.leaving]

    @override
    def run(self, x: Any, table: Table, guard: MutationGuard) -> FlatTree:
        arriving = [table.pop(Value(number)) for number in self._arriving]
        # Until it is known that nothing is edited in place, each step must be asked.
        call = self._call_at_once if self._again and guard.expects_none else self._call_each
        gives, leaving = call(x, arriving, guard)
        guard.after(self._title)
        for number, value in zip(self._leaving, leaving, strict=True):
            table[Value(number)] = value
        return join(list(map(tree_flatten, gives)))

    def _call_at_once(
        self, takes: Sequence[Any], arriving: Sequence[Any], _: MutationGuard
    ) -> tuple[list[Any], list[Any]]:
        function = self._part.function
        try:
            return function(takes, arriving)
        except BaseException as error:
            _add_step(error, function.step_of(error))
            raise

    def _call_each(
        self, takes: Sequence[Any], arriving: Sequence[Any], guard: MutationGuard
    ) -> tuple[list[Any], list[Any]]:
        part, step = self._part, None
        values = dict(zip(part.takes, takes, strict=True))
        values |= zip(self._arriving, arriving, strict=True)
        try:
            for step, dropped in zip(part.steps, part.drops, strict=True):
                values[step.value] = step(values)
                guard.after(step.title)
                for number in dropped:
                    del values[number]
        except BaseException as error:
            _add_step(error, step)
            raise
        return [values[k] for k in part.gives], [values[k] for k in self._leaving]


def work_of(stage: Stage, program: Program | None) -> Work:
    """The work of a stage: its part of a program, or its layers."""
    if program is None:
        return Layers(stage)
    return Steps(stage, program.parts[stage.partition.index])


def _add_step(error: BaseException, step: Step | None) -> None:
    """Add a note that says which step raised an error."""
    if step is not None:
        called = f", called in {step.line}" if step.line else ""
        add_note(error, f"raised in {step.title}{called}")
