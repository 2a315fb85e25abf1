"""The ways of what stages send: which stage sends it, and which one gets it.

Most of it goes to the next stage, and its gradients back. A route is the way of a skip tensor, or
of values of a program, from one stage to another.
"""

from __future__ import annotations

from typing import NamedTuple
from uuid import UUID

from lightning_gpipe.core.plan.action import Action

CALLER = -1  # in the place of a stage, before the first: who gives the inputs


class SkipName(NamedTuple):
    """A name within a namespace, or within none."""

    namespace: UUID | None
    name: str

    def __str__(self) -> str:
        return repr(self.name) if self.namespace is None else f"{self.name!r} (isolated)"


class Value(NamedTuple):
    """A value of a :class:`~lightning_gpipe.core.plan.program.Program`, by its number.

    In the arguments of a step it stands for what the value is when the step runs.
    """

    number: int

    def __str__(self) -> str:
        return f"%{self.number}"


class Values(NamedTuple):
    """The values of a program that go the same way, in one tree."""

    numbers: tuple[int, ...]

    def __str__(self) -> str:
        return ", ".join(f"%{number}" for number in self.numbers)


RouteName = SkipName | Values


class Route(NamedTuple):
    """A way from one stage to a later one that does not go through those between.

    The caller is at -1 before the first stage, and at n after the last.
    """

    name: RouteName
    source: int
    target: int

    @property
    def numbers(self) -> tuple[int, ...]:
        """Those of the values that it carries."""
        assert isinstance(self.name, Values), "a skip tensor has no number"
        return self.name.numbers

    def __str__(self) -> str:
        return f"{self.name}: stage {self.source} -> {self.target}"


def sender(to: Action, route: Route | None) -> int:
    """The stage that makes what ``to`` needs on a way; -1 and n stand for the caller."""
    forward = to.kind.direction > 0
    if route is None:
        return to.j - to.kind.direction
    return route.source if forward else route.target
