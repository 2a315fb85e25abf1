"""What a stage does with a micro-batch: run its layers one after another, or steps of a program.

Either takes what came with the micro-batch and by routes, and leaves what goes on with it and by
routes. Values on a route are in a table, by the name of the route; so are skip tensors, which the
layers themselves take out and put in.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import Any

from typing_extensions import override

from lightning_gpipe.core.data import FlatTree, join, tree_flatten
from lightning_gpipe.core.faithful import MutationGuard, add_note
from lightning_gpipe.core.plan import Part, Route, Value
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
        self._steps = tuple(zip(part.steps, part.drops, strict=True))
        self._title = str(stage)
        self._arriving = [each.number for each in part.arriving]
        self._leaving = [each.number for each in part.leaving]

    @override
    def run(self, x: Any, table: Table, guard: MutationGuard) -> FlatTree:
        part = self._part
        values = dict(zip(part.takes, x, strict=True))
        del x  # the values that are dropped would live on in it
        for number in self._arriving:
            values[number] = table.pop(Value(number))
        self._call_all(values, guard)
        guard.after(self._title)  # if it was not asked after each step
        for number in self._leaving:
            table[Value(number)] = values[number]
        return join([tree_flatten(values[number]) for number in part.gives])

    def _call_all(self, values: dict[int, Any], guard: MutationGuard) -> None:
        """Call the steps, which take their values of these and add their own."""
        step, each_step = None, not guard.expects_none  # a traced forward has very many
        try:
            for step, dropped in self._steps:
                values[step.value] = step(values)
                if each_step:
                    guard.after(step.title)
                for number in dropped:
                    del values[number]
        except BaseException as error:
            if step is not None:
                called = f", called in {step.line}" if step.line else ""
                add_note(error, f"raised in {step.title}{called}")
            raise
