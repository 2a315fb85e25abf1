"""The work of a stage on a micro-batch: the steps of its part of a program.

A route has values of the program, or a skip tensor, which layers pop from a table or stash in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from lightning_gpipe.core.data import FlatTree, joined, tree_flatten
from lightning_gpipe.core.faithful import MutationGuard, add_note
from lightning_gpipe.core.programs import Program, Step
from lightning_gpipe.core.run.stage import Stage
from lightning_gpipe.core.run.stage_borders import term_route
from lightning_gpipe.core.schedules import CALLER
from lightning_gpipe.core.skip import in_flight, leaving_tensors, table_of, using_table


class Work:
    """The steps of one stage of a program.

    ``arriving`` and ``leaving`` are all routes, in the order of the values; loss terms leave last.
    ``signature`` is equal for work that makes the same calls.
    """

    def __init__(self, stage: Stage, program: Program, *, terms: bool = False) -> None:
        j = stage.partition.index
        self._part = part = program.parts[j]
        own = j in program.stages  # else another module's, whose layers do not run
        arriving, self.skips_leaving = (stage.arriving, stage.leaving) if own else ((), ())
        self.arriving = (*arriving, *part.arriving)
        self.from_caller = CALLER in [route.source for route in self.arriving]
        of_terms = (term_route(j, program.n),) if terms else ()
        self.leaving = (*self.skips_leaving, *part.leaving, *of_terms)
        self.terms = terms
        self.signature = part.signature
        self._again = part.runs > 0  # so that a generated function pays
        part.runs += 1
        self._skips = own and stage.skips
        self._stage = stage

    def run(self, arrived: Sequence[Any], guard: MutationGuard) -> list[FlatTree]:
        """Run the stage's layers on one micro-batch.

        ``arrived`` is the value that came with the micro-batch, then the value of each route;
        ``guard`` notices edits in place of these, after each step. Return likewise the values that
        leave; no loss terms.
        """
        if not self._skips:
            outputs = self._run(arrived, guard)
            if table := in_flight():
                leaving_tensors(table, ())
            return outputs
        k = 1 + len(self._stage.arriving)
        table = table_of(self._stage.arriving, arrived[1:k])
        with using_table(table):
            main, *values = self._run([arrived[0], *arrived[k:]], guard)
        skips = leaving_tensors(table, self._stage.leaving)
        return [main, *map(tree_flatten, skips), *values]

    def _run(self, arrived: Sequence[Any], guard: MutationGuard) -> list[FlatTree]:
        takes, *arriving = arrived
        # Until it is known that no layer edits in place, each step must be checked.
        if not (self._again and (self._part.function.names_layers or guard.expects_none)):
            return self._call_each(takes, arriving, guard)
        function = self._part.function
        try:
            outputs = function.call(takes, arriving, guard.after)
        except BaseException as error:
            _add_step(error, function.step_of(error))
            raise
        if not function.names_layers:
            guard.after(str(self._stage))
        return outputs

    def _call_each(
        self, takes: Any, arriving: Sequence[Any], guard: MutationGuard
    ) -> list[FlatTree]:
        part, step = self._part, None
        values = dict(_numbered(part.takes, takes))
        for route, value in zip(part.arriving, arriving, strict=True):
            values |= _numbered(route.numbers, value)
        try:
            for step, dropped in zip(part.steps, part.drops, strict=True):
                values[step.value] = step(values)
                guard.after(step.title)
                for number in dropped:
                    del values[number]
        except BaseException as error:
            _add_step(error, step)
            raise
        ways = [part.gives, *(route.numbers for route in part.leaving)]
        return [joined([values[number] for number in numbers]) for numbers in ways]


def _numbered(numbers: Sequence[int], way: Any) -> Iterable[tuple[int, Any]]:
    return [(numbers[0], way)] if len(numbers) == 1 else zip(numbers, way, strict=True)


def _add_step(error: BaseException, step: Step | None) -> None:
    if step is not None and step.line:
        add_note(error, f"raised in {step.title}, called in {step.line}")
