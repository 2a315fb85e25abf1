"""Waits for processes that may never come: a barrier, and calls of a store with a timeout.

When no network reaches the machine of a torch.distributed store any more, the store does not
answer, and none of its timeouts applies. So another thread calls it, and is abandoned if need be.
"""

from __future__ import annotations

import atexit
import ctypes
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from threading import Thread
from typing import Any, NamedTuple, TypeVar
from uuid import uuid4

from torch.distributed.distributed_c10d import PrefixStore, Store

from lightning_gpipe.core.transport.process_group.connecting.signed_store import SignedStore
from lightning_gpipe.core.transport.process_group.tree import Tree
from lightning_gpipe.core.transport.process_group.whereabouts import ranges_of

_POLL = 0.05  # seconds
_JOIN = 1.0  # the same
_MISSING = "missing "
_NAME = "name"
T = TypeVar("T")


def store_barrier(
    store: Store,
    ranks: Sequence[int],
    rank: int,
    timeout: timedelta,
    purpose: str,
    offer: str = "",
    check: Callable[[], None] = lambda: None,
) -> str:
    """Wait for all processes, and agree on a name: one that all offer, or a new one.

    The processes are a tree. Each waits for its children, comes to its parent, and passes on the
    answer, which is the name of the first process. It comes under a name that the parent has drawn,
    and the parent answers each ticket, so entries of an earlier run in the store are no answers. A
    collective would wait for as long as the user's group does, and not name the missing.

    After ``timeout`` a RuntimeError names the missing, and the ``purpose``. ``check`` raises if
    there is no use in waiting any more.
    """
    place = "_".join(f"{first}-{last}" for first, last in ranges_of(ranks))
    members = Members(SignedStore(PrefixStore(place, store)), Tree(len(ranks)), rank, offer)
    # The first process may come last, and then wait itself.
    seconds = timeout.total_seconds() * (1 if rank == 0 else 2)
    deadline = time.monotonic() + seconds
    while (answer := members.answer(late=time.monotonic() > deadline)) is None:
        check()
        time.sleep(_POLL)
    members.pass_on(answer)
    if answer.startswith(_MISSING):
        raise RuntimeError(
            f"all processes must {purpose}: rank {answer.removeprefix(_MISSING)} did not within "
            f"{timeout.total_seconds():g} s. Check whether it has failed; if it is slow to start, "
            "set a longer lost_after, of which this is ten times."
        )
    return answer


class Arrival(NamedTuple):
    """A process that has come to its parent, and those below it."""

    ticket: str  # a name that it has drawn for this time
    offer: str
    missing: str  # the numbers of those that have not come, with commas between


class Members:
    """The part of one process in a barrier: it comes to its parent, and its children to it."""

    def __init__(self, store: SignedStore, tree: Tree, rank: int, offer: str) -> None:
        self._store = store
        self._rank = rank
        self._offer = offer
        self._own = uuid4().hex  # its ticket, and the name under which the children come
        self._parent = tree.parent(rank)
        self._name = ""  # the parent's
        self._children: dict[int, Arrival | None] = dict.fromkeys(tree.children(rank))

    def answer(self, *, late: bool) -> str | None:
        """Come once more; return the answer, if it is there or it is too late."""
        if self._children:
            self._store.set(f"{self._rank}/{_NAME}", self._own)  # again, in case of a stranger
        for child in self._children:
            entry = self._store.get(f"{self._own}/{child}")
            self._children[child] = None if entry is None else Arrival(*entry.split(" "))
        return self._come(self._entry(), late) if self._rank else self._decide(self._entry(), late)

    def pass_on(self, answer: str) -> None:
        for entry in self._children.values():
            if entry is not None:
                self._store.set(f"{self._own}/{entry.ticket}", answer)

    def _entry(self) -> Arrival:
        missing = [str(k) for k, entry in self._children.items() if entry is None]
        present = [entry for entry in self._children.values() if entry is not None]
        missing += [entry.missing for entry in present if entry.missing]
        same = all(entry.offer == self._offer for entry in present)
        return Arrival(self._own, self._offer if same else "", ",".join(missing))

    def _decide(self, entry: Arrival, late: bool) -> str | None:
        if not entry.missing:
            return entry.offer or self._own
        return _MISSING + entry.missing.replace(",", ", ") if late else None

    def _come(self, entry: Arrival, late: bool) -> str | None:
        """Come to the parent, which may come last; return its answer, if there is one."""
        latest = self._store.get(f"{self._parent}/{_NAME}") or self._name
        # The parent answers before it goes on to its next barrier, under another name.
        if self._name and (answer := self._store.get(f"{self._name}/{self._own}")) is not None:
            return answer
        self._name = latest
        if self._name:
            self._store.set(f"{self._name}/{self._rank}", " ".join(entry))
        return f"{_MISSING}{0 if self._name else self._parent}" if late else None


def call_with_timeout(timeout: timedelta, function: Callable[[], T], message: str) -> T:
    """Return what ``function`` returns on another thread; RuntimeError after ``timeout``."""
    outcome: Future[T] = Future()

    def call() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:
            outcome.set_exception(error)

    thread = Thread(target=call, name="gpipe-question", daemon=True)
    thread.start()
    seconds = timeout.total_seconds()
    try:
        if not wait([outcome], seconds).done:
            raise RuntimeError(f"{message} within {seconds:g} s.")
    except BaseException:  # a timeout, or Ctrl-C
        atexit.register(_leave_behind, thread)
        raise
    return outcome.result()


def _leave_behind(thread: Thread) -> None:
    """Join a thread, or stop it where it waits: see Note [Threads end before the interpreter]."""
    thread.join(_JOIN)
    if thread.is_alive() and thread.ident is not None and hasattr(signal, "pthread_kill"):
        libc: Any = ctypes.CDLL(None)
        libc.signal.argtypes = ctypes.c_int, ctypes.c_void_p
        libc.signal.restype = ctypes.c_void_p
        # The handler is the function that waits for signals: it does not return to the answer.
        libc.signal(signal.SIGURG, ctypes.cast(libc.pause, ctypes.c_void_p))
        signal.pthread_kill(thread.ident, signal.SIGURG)
