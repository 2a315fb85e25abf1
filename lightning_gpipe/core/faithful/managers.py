"""Combinations of context managers, at no cost if there are none.

To enter a manager that does nothing takes as long as a small layer, so none is made then.

# Note [Context managers are classes]
Ctrl-C can come between the end of a ``with`` block and the call of ``__exit__``. A context manager
written as a generator then exits when the generator is garbage-collected, in the middle of other
work: grad mode would be reset to that of an earlier backward. An object of a class does nothing
when it is collected. So a manager that changes the state of a thread or of the layers is a class
with ``__enter__`` and ``__exit__``, and the next mini-batch undoes from the journal what it did not
undo. What no mini-batch would undo is a generator, see ``Closing``. Nor does an error of a layer
pass through a generator: contextlib sets the error's traceback, and an error that does not allow
that would be replaced by another one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

Manager = AbstractContextManager[Any]

NOTHING: Manager = nullcontext()


def together(managers: Sequence[Manager]) -> Manager:
    """Return one manager that enters all of ``managers``, in order."""
    managers = [manager for manager in managers if manager is not NOTHING]
    if not managers:
        return NOTHING
    return managers[0] if len(managers) == 1 else LazyManagers(managers.__iter__)


class Bracket:
    """Calls ``begin`` when a ``with`` block begins, and ``end`` with its result when it ends."""

    # A class: see Note [Context managers are classes]. It takes half the time of a generator.

    def __init__(self, begin: Callable[[], Any], end: Callable[[Any], object]) -> None:
        self._begin, self._end = begin, end

    def __enter__(self) -> None:
        self._begun = self._begin()

    def __exit__(self, *error: object) -> None:
        self._end(self._begun)


def setting(read: Callable[[], Any], write: Callable[[Any], object], value: Any) -> Manager:
    """Give a setting another value, by functions, for the duration of a ``with`` block."""

    def begin() -> Any:
        before = read()
        write(value)
        return before

    return Bracket(begin, write)


class LazyManagers:
    """Enters the managers that a function returns on entry; none of them suppresses an error."""

    # A class: see Note [Context managers are classes]. An ExitStack takes several times as long.

    def __init__(self, managers: Callable[[], Iterable[Manager]]) -> None:
        self._managers = managers

    def __enter__(self) -> None:
        self._entered: list[Manager] = []
        try:
            for manager in self._managers():
                manager.__enter__()
                self._entered.append(manager)
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise

    def __exit__(self, *error: Any) -> None:
        entered = self._entered
        try:
            while entered:
                entered.pop().__exit__(*error)
        except BaseException:
            self.__exit__(*sys.exc_info())  # the others
            raise


class Closing(AbstractContextManager[None]):
    """Advances a generator to its only yield on entry, and to its end on exit.

    If Ctrl-C comes just before the exit, the generator is closed when it is garbage-collected: what
    nothing later would undo is undone, and other threads do not wait for ever.
    ``contextlib.contextmanager`` does this too, but sets attributes of an error that passes
    through, which fails if it is a frozen dataclass.
    """

    def __init__(self, generator: Generator[None, None, None]) -> None:
        self._generator = generator

    def __enter__(self) -> None:
        next(self._generator)

    def __exit__(self, *error: object) -> None:
        next(self._generator, None)
