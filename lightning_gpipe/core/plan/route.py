"""The stage that sends a skip tensor, and the stage that it is sent to."""

from __future__ import annotations

from typing import NamedTuple
from uuid import UUID


class SkipName(NamedTuple):
    """A name within a namespace, or within none."""

    namespace: UUID | None
    name: str

    def __str__(self) -> str:
        return repr(self.name) if self.namespace is None else f"{self.name!r} (isolated)"


class Route(NamedTuple):
    """A skip connection that crosses from one stage to a later one."""

    name: SkipName
    source: int
    target: int

    def __str__(self) -> str:
        return f"{self.name}: stage {self.source} -> {self.target}"
