"""The stage that sends a skip tensor, or values of a program, and the stage that gets them."""

from __future__ import annotations

from typing import NamedTuple
from uuid import UUID


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
