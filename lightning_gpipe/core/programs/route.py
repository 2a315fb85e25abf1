"""Routes: the ways of skip tensors and values between stages that are not neighbours."""

from __future__ import annotations

from typing import NamedTuple
from uuid import UUID

from lightning_gpipe.core.schedules import Action


class SkipName(NamedTuple):
    """A name within a namespace, or within none."""

    namespace: UUID | None
    name: str

    def __str__(self) -> str:
        return repr(self.name) if self.namespace is None else f"{self.name!r} (isolated)"


class Value(NamedTuple):
    """The number of a value of a program: a placeholder for it in the arguments of steps."""

    number: int

    def __str__(self) -> str:
        return f"%{self.number}"


class Values(NamedTuple):
    """The numbers of the values of a program that go the same way together."""

    numbers: tuple[int, ...]

    def __str__(self) -> str:
        return ", ".join(f"%{number}" for number in self.numbers)


RouteName = SkipName | Values


class Route(NamedTuple):
    """A way from a stage to a later one past those between; the caller is at -1, and at n."""

    name: RouteName
    source: int
    target: int

    @property
    def numbers(self) -> tuple[int, ...]:
        assert isinstance(self.name, Values), "a skip tensor has no number"
        return self.name.numbers

    def __str__(self) -> str:
        return f"{self.name}: stage {self.source} -> {self.target}"


def sender(to: Action, route: Route | None) -> int:
    """Return the stage, or -1 or n for the caller, from which ``to`` gets a value."""
    if route is None:
        return to.j - to.kind.direction
    return route.source if to.kind.direction > 0 else route.target
