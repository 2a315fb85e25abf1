"""Notes on errors of the user's code."""

from __future__ import annotations

from contextlib import suppress
from traceback import walk_tb

from torch import nn


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an error, unless it takes none, as a frozen dataclass does."""
    with suppress(Exception):
        error.add_note(note)


def modules_raising(error: BaseException) -> list[nn.Module]:
    """Return the modules whose methods an error has passed, the innermost one first.

    The frame that handles the error is left out: to read its local variables would make a cycle.
    """
    frames = [frame for frame, _ in walk_tb(error.__traceback__)][:0:-1]
    owners = [frame.f_locals.get("self") for frame in frames]
    return [owner for owner in owners if isinstance(owner, nn.Module)]
