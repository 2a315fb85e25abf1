"""A journal of all changes in the user's modules while they run, or for the time of a fit.

Shadows in the slots of parameters, another ``forward`` of batch norms, saved buffers in a
recomputation: all must be undone, however the run ends. Ctrl-C can come before a ``try``, after it,
or while changes are undone. So a change is recorded before it is made, undoing is idempotent, and
an interrupted undo is repeated before the next mini-batch.

When a run has failed, a worker may still be in the middle of a layer. The caller must not wait for
it, nor find shadows in place of parameters. So it abandons the journal: it undoes the changes
itself, and the worker cannot make any more.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Generator, Iterable
from functools import partial
from itertools import count
from typing import Any, Protocol
from weakref import ref

from lightning_gpipe.core.faithful.managers import Bracket, Closing, Manager


class Slots(Protocol):
    """Named values that can be written, such as the parameters or the attributes of a module."""

    def __getitem__(self, name: str, /) -> Any: ...
    def __setitem__(self, name: str, value: Any, /) -> None: ...


Write = tuple[Slots, str, Any]  # the slots, the name among them, and the new value


class Attributes:
    """The attributes of an object as slots; writing to one is an assignment."""

    def __init__(self, owner: object) -> None:
        self._owner = owner

    def __getitem__(self, name: str) -> Any:
        return getattr(self._owner, name)

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self._owner, name, value)


class ValueSlot:
    """One value inside an object as a slot: ``read`` returns a copy of it, ``write`` sets it."""

    def __init__(self, read: Callable[[], Any], write: Callable[[Any], object]) -> None:
        self._read = read
        self._write = write

    def __getitem__(self, name: str) -> Any:
        return self._read()

    def __setitem__(self, name: str, value: Any) -> None:
        self._write(value)


ABSENT: Any = object()


# One change: the slots, the name, the value that was replaced, and the one that is there instead.
_Entry = tuple[Slots, str, Any, Any]


class JournalAbandoned(BaseException):
    """Raised in a worker that would change the modules after its run has failed."""


class Journal:
    """The changes in force, in the order in which they were made; made by one thread at a time.

    Example::

        with journal.changed([(layer._parameters, "weight", shadow)]):
            layer(x)
    """

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self._abandoned = False
        # Reentrant, because Ctrl-C just before a `with` block exits leaves it locked.
        self._lock = threading.RLock()
        for number, reference in list(_JOURNALS.items()):
            if reference() is None:
                _JOURNALS.pop(number, None)
        _JOURNALS[next(_NUMBERS)] = ref(self)

    def __len__(self) -> int:
        return len(self._entries)

    def write(self, writes: Iterable[Write]) -> int:
        """Put each new value into its slot; :data:`ABSENT` empties it.

        Returns the number of changes in force before.
        """
        entries = []
        for slots, name, new in writes:
            try:  # value_in(slots, name): a call for each parameter takes longer
                old = slots[name]
            except LookupError:
                old = ABSENT
            entries.append((slots, name, old, new))
        with self._lock:
            if self._abandoned:
                raise JournalAbandoned
            before = len(self._entries)
            self._entries += entries
            for slots, name, _, new in entries:
                if new is not ABSENT:
                    slots[name] = new
                else:
                    _empty(slots, name)
        return before

    def changed(self, writes: Iterable[Write]) -> Manager:
        """Make changes for the duration of a ``with`` block; undo those made within it, too."""
        return Bracket(partial(self.write, writes), self.undo)

    def undo(self, length: int = 0) -> None:
        """Undo all changes but the first ``length``, the latest first."""
        entries = self._entries
        if len(entries) <= length:
            return
        with self._lock:
            while len(entries) > length:
                slots, name, old, _ = entries[-1]
                if old is not ABSENT:
                    slots[name] = old
                else:
                    _empty(slots, name)
                entries.pop()

    def abandon(self) -> None:
        """Undo the changes of a thread that goes on, and refuse any more until :meth:`reset`.

        A slot that has another value by now, as from a pipeline in a layer, is left to that thread.
        """
        with self._lock:
            self._abandoned = True
            left: list[_Entry] = []
            while self._entries:
                slots, name, old, new = self._entries.pop()
                if value_in(slots, name) is not new:
                    left.insert(0, (slots, name, old, new))
                elif old is not ABSENT:
                    slots[name] = old
                else:
                    _empty(slots, name)
            self._entries += left

    def reset(self) -> None:
        """Undo changes that an interrupt has left, before a run, while no other thread runs."""
        self._lock = threading.RLock()  # as unlock() does
        self._abandoned = False
        if self._entries:
            self.undo()

    def unlock(self) -> None:
        """Release the lock of a thread that was interrupted, or is not in this process."""
        self._lock = threading.RLock()

    def __reduce__(self) -> tuple[type[Journal], tuple[()]]:
        return Journal, ()  # a copied module has no changes in force


def patched(writes: Iterable[Write]) -> Manager:
    """Make changes for the duration of a ``with`` block; Ctrl-C at any moment leaves none.

    For changes that no later mini-batch would undo, as it does what is in the journal of a stage.
    """
    return Closing(_patches(writes))


def _patches(writes: Iterable[Write]) -> Generator[None, None, None]:
    journal = Journal()
    try:
        with journal.changed(writes):
            yield
    finally:
        journal.undo()  # the rest, if that was interrupted


# All journals of the process, because a fork copies all of it: see below. Not a WeakSet, which acts
# when a member is freed: that can be in the middle of a step, and Python drops an interrupt that
# comes while it frees an object. By numbers, each used once, so that threads need no lock, which a
# fork would copy.
_JOURNALS: dict[int, ref[Journal]] = {}
_NUMBERS = count()


def _abandon_all() -> None:
    """In a forked process, undo the changes of runs that go on in the parent's threads only."""
    journals = [living for each in list(_JOURNALS.values()) if (living := each()) is not None]
    for journal in journals:
        journal.unlock()
    for _ in journals:  # once per level of nested pipelines, the innermost first
        for journal in filter(len, journals):
            journal.abandon()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_abandon_all)


def value_in(slots: Slots, name: Any) -> Any:
    """Return the value in a slot, or :data:`ABSENT`."""
    try:
        return slots[name]
    except LookupError:
        return ABSENT


def _empty(slots: Any, name: str) -> None:
    if value_in(slots, name) is not ABSENT:
        del slots[name]
