"""What other processes are told of an error, once.

An error passes several places that tell it: the mini-batch, the model around it, the Trainer. It
notes where it was told, and so does what the user's code makes of it.
"""

from __future__ import annotations

from collections.abc import Iterator

_TOLD = "_lightning_gpipe_told"  # in an error: for each teller, what followed


def note(error: BaseException, teller: str, serial: int) -> None:
    """Note in an error that others were told of it, before exchange ``serial``."""
    vars(error).setdefault(_TOLD, {})[teller] = serial


def noted(error: BaseException, teller: str, serial: int) -> bool:
    """Whether that is in an error, or in one of which it was made."""
    return any(vars(each).get(_TOLD, {}).get(teller) == serial for each in _chain(error))


def text_of(error: BaseException) -> str:
    """An error with its notes, in a line."""
    notes = [f"({note})" for note in getattr(error, "__notes__", [])]
    return " ".join([f"{type(error).__name__}: {error}", *notes])


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
