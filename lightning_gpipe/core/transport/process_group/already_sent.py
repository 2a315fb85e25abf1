"""Marks errors that were already sent to the other processes.

An error passes several places that send it: the mini-batch, the model around it, the Trainer. The
mark is in the error itself, and holds for errors that the user's code raises from it, too.
"""

from __future__ import annotations

from collections.abc import Iterator

_SENT = "_lightning_gpipe_told"  # in an error: for each sender, the number of the next exchange


def mark_sent(error: BaseException, sender: str, serial: int) -> None:
    """Record in an error that ``sender`` has sent it, before exchange ``serial``."""
    vars(error).setdefault(_SENT, {})[sender] = serial


def was_sent(error: BaseException, sender: str, serial: int) -> bool:
    """Return True if an error, or one that it was raised from, has this mark."""
    return any(vars(cause).get(_SENT, {}).get(sender) == serial for cause in _chain(error))


def text_of(error: BaseException) -> str:
    """Return an error and its notes in one line."""
    notes = [f"({note})" for note in getattr(error, "__notes__", [])]
    return " ".join([f"{type(error).__name__}: {error}", *notes])


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
