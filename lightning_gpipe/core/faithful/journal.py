"""One journal of whatever the engine changes in the user's modules while they run.

While a stage runs, shadows stand in the slots of its parameters, batch norms have another
``forward``, a recomputation works on lent buffers and in the training mode of its forward. All of
it must be undone, whatever ends the run: an error in a layer, or Ctrl-C, which strikes the calling
thread between any two lines. A ``try`` around the changes is not enough, for an interrupt can come
before it, after it, or in the middle of what undoes them.

So a change is recorded before it is made: where, and the value that it replaces. What is recorded
can be undone, also a second time, so an interrupted undo is repeated: at the latest before the
next mini-batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol


class Slots(Protocol):
    """Named values that can be written: a module's parameters, say, or its attributes."""

    def __getitem__(self, name: str, /) -> Any: ...
    def __setitem__(self, name: str, value: Any, /) -> None: ...
    def __delitem__(self, name: str, /) -> None: ...


Write = tuple[Slots, str, Any]  # where, the name there, and the new value


class Attributes:
    """The attributes of an object as slots, set as assigning to them does."""

    def __init__(self, owner: object) -> None:
        self._owner = owner

    def __getitem__(self, name: str) -> Any:
        return getattr(self._owner, name)

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self._owner, name, value)

    def __delitem__(self, name: str) -> None:
        delattr(self._owner, name)


class _Absent:
    """Stands for no value."""


_ABSENT = _Absent()


class _Entry(NamedTuple):
    """One change, and the value that it replaced."""

    slots: Slots
    name: str
    old: Any


class Journal:
    """The changes that are in force, in the order in which they were made; of one thread at a time.

    Example::

        with journal.changed([(layer._parameters, "weight", shadow)]):
            layer(x)
    """

    def __init__(self) -> None:
        self._entries: list[_Entry] = []

    def __len__(self) -> int:
        """How many changes are in force."""
        return len(self._entries)

    def write(self, writes: Iterable[Write]) -> None:
        """Put each new value into its slot."""
        writes = list(writes)
        self._entries += [_Entry(slots, name, _value_in(slots, name)) for slots, name, _ in writes]
        for slots, name, value in writes:
            slots[name] = value

    def changed(self, writes: Iterable[Write]) -> Changed:
        """A ``with`` block in which the slots have their new values."""
        return Changed(self, writes)

    def undo(self, length: int = 0) -> None:
        """Undo all changes but the first ``length``, the latest first.

        May be interrupted, and is then continued by the next call.
        """
        entries = self._entries
        while len(entries) > length:
            slots, name, old = entries[-1]
            _put(slots, name, old)
            entries.pop()

    def __reduce__(self) -> tuple[type[Journal], tuple[()]]:
        return Journal, ()  # a copy of a module has changed nothing yet


class Changed:
    """Has changes in force for the duration of a ``with`` block, and ends all made within it."""

    # A class: it costs half of what a generator does; and Note [Context managers are classes].

    def __init__(self, journal: Journal, writes: Iterable[Write]) -> None:
        self._journal = journal
        self._writes = writes

    def __enter__(self) -> None:
        self._length = len(self._journal)
        self._journal.write(self._writes)

    def __exit__(self, *error: object) -> None:
        self._journal.undo(self._length)


def _value_in(slots: Slots, name: str) -> Any:
    try:
        return slots[name]
    except KeyError:
        return _ABSENT


def _put(slots: Slots, name: str, value: Any) -> None:
    if value is not _ABSENT:
        slots[name] = value
    elif _value_in(slots, name) is not _ABSENT:
        del slots[name]
