"""A journal of everything that the engine changes in the user's modules while they run.

While a stage runs, shadows are in the slots of its parameters, batch norms have another
``forward``, and a recomputation uses saved buffers and the training mode of its forward. All of
this must be undone, however the run ends: by an error in a layer, or by Ctrl-C, which can interrupt
the calling thread between any two lines. A ``try`` around the changes is not enough, because an
interrupt can come before it, after it, or while the changes are undone.

So a change is recorded before it is made: its slot, and the value that it replaces. Undoing is
idempotent, so an interrupted undo is repeated, at the latest before the next mini-batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol


class Slots(Protocol):
    """Named values that can be written, such as the parameters or the attributes of a module."""

    def __getitem__(self, name: str, /) -> Any: ...
    def __setitem__(self, name: str, value: Any, /) -> None: ...
    def __delitem__(self, name: str, /) -> None: ...


Write = tuple[Slots, str, Any]  # the slots, the name among them, and the new value


class Attributes:
    """The attributes of an object as slots; writing to one is an assignment."""

    def __init__(self, owner: object) -> None:
        self._owner = owner

    def __getitem__(self, name: str) -> Any:
        return getattr(self._owner, name)

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self._owner, name, value)

    def __delitem__(self, name: str) -> None:
        delattr(self._owner, name)


class _Absent:
    """The type of the marker for an empty slot."""

    def __reduce__(self) -> str:
        return "ABSENT"  # there is one


ABSENT: Any = _Absent()


class _Entry(NamedTuple):
    """One change, and the value that it replaced."""

    slots: Slots
    name: str
    old: Any


class Journal:
    """The changes in force, in the order in which they were made; used by one thread at a time.

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
        """Put each new value into its slot; :data:`ABSENT` empties it."""
        writes = list(writes)
        self._entries += [_Entry(slots, name, value_in(slots, name)) for slots, name, _ in writes]
        for slots, name, value in writes:
            _put(slots, name, value)

    def changed(self, writes: Iterable[Write]) -> Changed:
        """Make changes for the duration of a ``with`` block."""
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
        return Journal, ()  # a copied module has no changes in force


class Changed:
    """Makes changes for the duration of a ``with`` block, and undoes those made within it too."""

    # A class, not a generator: half the time, and Note [Context managers are classes].

    def __init__(self, journal: Journal, writes: Iterable[Write]) -> None:
        self._journal = journal
        self._writes = writes

    def __enter__(self) -> None:
        self._length = len(self._journal)
        self._journal.write(self._writes)

    def __exit__(self, *error: object) -> None:
        self._journal.undo(self._length)


def value_in(slots: Slots, name: Any) -> Any:
    """The value in a slot, or :data:`ABSENT`."""
    try:
        return slots[name]
    except LookupError:
        return ABSENT


def _put(slots: Slots, name: str, value: Any) -> None:
    if value is not ABSENT:
        slots[name] = value
    elif value_in(slots, name) is not ABSENT:
        del slots[name]
