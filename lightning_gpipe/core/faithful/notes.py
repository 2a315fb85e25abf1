"""Notes on errors of the user's code."""

from __future__ import annotations

from contextlib import suppress


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an error, unless it takes none, as a frozen dataclass does."""
    with suppress(Exception):
        error.add_note(note)
