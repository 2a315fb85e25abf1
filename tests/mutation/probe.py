"""Collects the effects that a test reaches; modules of an instrumented copy of the tree call it.

Some tests start processes of their own, some of which live through many tests. Each writes what it
reaches into a file of its own, whose name begins as the environment says.
"""

from __future__ import annotations

import os
from pathlib import Path

FILE = "MUTATION_REACHED"  # the variable

_since: set[int] = set()
_home: list[int] = []  # the process that runs the tests


def begin() -> None:
    """Make this the process that runs the tests."""
    _home[:] = [os.getpid()]
    take()


def reached(index: int) -> None:
    """Record that an effect is reached."""
    file = _file_of(os.getpid())
    if file is not None and not file.exists():  # taken: another test has begun
        _since.clear()
    if index not in _since:
        _since.add(index)
        if file is not None:
            with file.open("a", encoding="utf-8") as lines:
                print(index, file=lines)


def take() -> list[int]:
    """The effects reached since the last call, in processes of tests too."""
    taken = set(_since)
    _since.clear()
    first = Path(os.environ.get(FILE, os.devnull))
    for path in first.parent.glob(f"{first.name}.*"):
        taken.update(map(int, path.read_text(encoding="utf-8").split()))
        path.unlink()
    return sorted(taken)


def _file_of(process: int) -> Path | None:
    """The file of a process of a test; None for the one that runs the tests."""
    if process in _home or FILE not in os.environ:
        return None
    return Path(f"{os.environ[FILE]}.{process}")
