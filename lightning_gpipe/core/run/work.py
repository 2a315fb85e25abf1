"""What a stage does with a micro-batch: run its layers one after another, or steps of a program.

Either takes what came with the micro-batch and by routes, and leaves what goes on with it and by
routes. A route carries a skip tensor, which the layers themselves take out of a table and put into
it, or values of a program.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import Any

from typing_extensions import override

from lightning_gpipe.core.data import FlatTree, joined, tree_flatten
from lightning_gpipe.core.faithful import MutationGuard, add_note
from lightning_gpipe.core.plan import Part, Program, Route, Step
from lightning_gpipe.core.run.stage import Stage
from lightning_gpipe.core.skip import in_flight, leaving_in, table_of, using_table


class Work(ABC):
    """What a stage does with a micro-batch.

    Args:
        stage: The stage.
        arriving: The routes of values to it.
        leaving: The routes of values from it.

    Attributes:
        arriving: All routes to the stage, in the order of what arrives.
        leaving: All routes from it, in the order of what leaves.
        signature: Equal for work that makes the same calls.
    """

    signature: Hashable = None

    def __init__(
        self, stage: Stage, arriving: tuple[Route, ...] = (), leaving: tuple[Route, ...] = ()
    ) -> None:
        self.arriving = (*stage.arriving, *arriving)
        self.leaving = (*stage.leaving, *leaving)
        self._skips = stage.skips
        self._arriving_skips, self._leaving_skips = stage.arriving, stage.leaving

    def run(self, arrived: Sequence[Any], guard: MutationGuard) -> list[FlatTree]:
        """Do it.

        Args:
            arrived: What came with the micro-batch, and then what came by each route.
            guard: Notices edits in place of what arrived, and is told what may have made one.

        Returns:
            What goes on with the micro-batch, and then what leaves by each route.
        """
        if not self._skips:
            outputs = self._run(arrived, guard)
            if table := in_flight():
                leaving_in(table, ())
            return outputs
        k = 1 + len(self._arriving_skips)
        table = table_of(self._arriving_skips, arrived[1:k])
        with using_table(table):
            main, *values = self._run([arrived[0], *arrived[k:]], guard)
        skips = leaving_in(table, self._leaving_skips)
        return [main, *map(tree_flatten, skips), *values]

    @abstractmethod
    def _run(self, arrived: Sequence[Any], guard: MutationGuard) -> list[FlatTree]:
        """Do it, with the table of skip tensors in place."""


class Layers(Work):
    """The layers of a stage, each on what the previous one returned.

    Args:
        stage: The stage.
    """

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage)
        self._layers = stage.titled

    @override
    def _run(self, arrived: Sequence[Any], guard: MutationGuard) -> list[FlatTree]:
        [x] = arrived
        after = guard.after
        for layer, title in self._layers:
            x = layer(x)
            after(title)
        return [tree_flatten(x)]


class Steps(Work):
    """The steps of one stage of a program.

    Args:
        stage: The stage.
        part: Its part of the program.
    """

    def __init__(self, stage: Stage, part: Part) -> None:
        super().__init__(stage, part.arriving, part.leaving)
        self.signature = part.signature
        self._part = part
        self._again = stage.has_run(part)  # it is worth while to make a function of it
        self._title = str(stage)

    @override
    def _run(self, arrived: Sequence[Any], guard: MutationGuard) -> list[FlatTree]:
        takes, *arriving = arrived
        # Until it is known that nothing is edited in place, each step must be asked.
        if self._again and guard.expects_none:
            gives, leaving = self._call_at_once(takes, arriving)
            guard.after(self._title)
        else:
            gives, leaving = self._call_each(takes, arriving, guard)
        return [joined(gives), *map(joined, leaving)]

    def _call_at_once(
        self, takes: Sequence[Any], arriving: Sequence[Sequence[Any]]
    ) -> tuple[list[Any], list[list[Any]]]:
        function = self._part.function
        try:
            return function.call(takes, arriving)
        except BaseException as error:
            _add_step(error, function.step_of(error))
            raise

    def _call_each(
        self, takes: Sequence[Any], arriving: Sequence[Sequence[Any]], guard: MutationGuard
    ) -> tuple[list[Any], list[list[Any]]]:
        part, step = self._part, None
        values = dict(zip(part.takes, takes, strict=True))
        for route, arrived in zip(part.arriving, arriving, strict=True):
            values |= zip(route.numbers, arrived, strict=True)
        try:
            for step, dropped in zip(part.steps, part.drops, strict=True):
                values[step.value] = step(values)
                guard.after(step.title)
                for number in dropped:
                    del values[number]
        except BaseException as error:
            _add_step(error, step)
            raise
        leaving = [[values[number] for number in route.numbers] for route in part.leaving]
        return [values[number] for number in part.gives], leaving


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
