"""Collects the effects that a test reaches; modules of an instrumented copy of the tree call it.

Some tests start processes of their own. Those write what they reach into a file, whose name they
find in the environment.
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
    if index not in _since:
        _since.add(index)
        if FILE in os.environ and os.getpid() not in _home:
            with open(os.environ[FILE], "a", encoding="utf-8") as file:
                print(index, file=file)


def take() -> list[int]:
    """The effects reached since the last call, in processes of tests too."""
    taken = set(_since)
    _since.clear()
    path = Path(os.environ.get(FILE, os.devnull))
    if path.is_file():
        taken.update(map(int, path.read_text(encoding="utf-8").split()))
        path.unlink()
    return sorted(taken)
