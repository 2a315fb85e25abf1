"""A plain interpreter of programs: micro-batches one after another, stages one after another.

It does what an engine must, and no more: a stage has only what its part takes, and what arrives by
routes, and drops what its part says.
"""

from collections.abc import Sequence
from typing import Any

from lightning_gpipe.core.data import Rows
from lightning_gpipe.core.programs import Program
from lightning_gpipe.core.programs.route import Route


class Interpreter:
    """Runs programs in ``chunks`` micro-batches, in the caller's graph.

    Attributes:
        programs: Those that ran.
    """

    def __init__(self, chunks: int = 3) -> None:
        self._chunks = chunks
        self.programs: list[Program] = []
        self.used: list[int] = []

    def __call__(
        self,
        program: Program,
        values: Sequence[Any],
        *,
        chunks: int | None = None,
    ) -> list[Any]:
        self.programs.append(program)
        rows = Rows()
        pieces = rows.split(list(values), chunks or self._chunks)
        self.used.append(len(pieces))
        outputs = [run_once(program, piece) for piece in pieces]
        merged: list[Any] = rows.merge(outputs, list(values))
        return merged


def run_once(program: Program, values: Sequence[Any]) -> list[Any]:
    """Run a program on one micro-batch."""
    inputs = dict(zip(program.inputs, values, strict=True))
    flying: dict[Route, Any] = {
        route: [inputs[number] for number in route.numbers] for route in program.given
    }
    handed = {key: inputs[key] for key in program.first}
    for part in program.parts:
        assert set(handed) == set(part.takes)
        known = dict(handed)
        for route in part.arriving:
            known |= zip(route.numbers, flying.pop(route), strict=True)
        for step, dropped in zip(part.steps, part.drops, strict=True):
            known[step.value] = step(known)
            for key in dropped:
                del known[key]
        flying |= {route: [known[number] for number in route.numbers] for route in part.leaving}
        handed = {key: known[key] for key in part.gives}
    outputs = handed
    for route in program.returned:
        outputs |= zip(route.numbers, flying.pop(route), strict=True)
    assert not flying
    return [outputs[key] for key in program.outputs]
