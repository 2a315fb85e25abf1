"""Collects the effects that a test reaches; modules of an instrumented copy of the tree call it."""

from __future__ import annotations

_since: set[int] = set()


def reached(index: int) -> None:
    """Record that an effect is reached."""
    _since.add(index)


def take() -> list[int]:
    """The effects reached since the last call."""
    taken = sorted(_since)
    _since.clear()
    return taken
