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
from typing import Any, TypeVar
from uuid import uuid4

from torch.distributed.distributed_c10d import PrefixStore, Store

from lightning_gpipe.core.transport.process_group.connecting.signed_store import SignedStore

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

    The first process writes a new name, waits until all have come to it, and answers each. Entries
    that an earlier run left in the store, such as one that torchrun has ended, have other names. A
    collective would wait for as long as the user's process group does, and not name the missing.

    Args:
        store: The store that all of them read and write.
        ranks: The global ranks of the processes.
        rank: The number of this process among them.
        timeout: How long to wait for the others.
        purpose: Why they come, for the message.
        offer: The name that this process offers, if any.
        check: Raises if there is no use in waiting any more.

    Raises:
        RuntimeError: If some have not come by then.
    """
    place, own_name = SignedStore(PrefixStore("-".join(map(str, ranks)), store)), uuid4().hex
    if rank == 0:
        answer = _gather(place, own_name, len(ranks), timeout, offer, check)
    else:
        answer = _come(place, rank, 2 * timeout, f"{own_name} {offer}", check)
    if answer.startswith(_MISSING):
        raise RuntimeError(
            f"all processes must {purpose}: rank {answer.removeprefix(_MISSING)} did not within "
            f"{timeout.total_seconds():g} s. Check whether it has failed; if it is slow to start, "
            "set a longer lost_after, of which this is ten times."
        )
    return answer


def _gather(
    store: SignedStore,
    name: str,
    size: int,
    timeout: timedelta,
    offer: str,
    check: Callable[[], None],
) -> str:
    """Wait for the others at this name; return the answer that they get."""
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        store.set(_NAME, name)  # again, in case that a stranger has written there
        entries = {k: store.get(f"{name}/{k}") for k in range(1, size)}
        missing = [k for k, entry in entries.items() if entry is None]
        if not missing or time.monotonic() > deadline:
            break
        check()
        time.sleep(_POLL)
    present = [entry.split(" ") for entry in entries.values() if entry is not None]
    common = offer if all(other == offer for _, other in present) else ""
    answer = _MISSING + ", ".join(map(str, missing)) if missing else common or name
    for ticket, _ in present:
        store.set(f"{name}/{ticket}", answer)
    return answer


def _come(
    store: SignedStore, rank: int, timeout: timedelta, entry: str, check: Callable[[], None]
) -> str:
    """Come to the first process, which may come last and wait itself; return its answer."""
    ticket = entry.partition(" ")[0]
    name, deadline = "", time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        latest = store.get(_NAME) or name
        # The first process answers before it goes on to its next barrier, under another name.
        if name and (answer := store.get(f"{name}/{ticket}")) is not None:
            return answer
        name = latest
        if name:
            store.set(f"{name}/{rank}", entry)
        check()
        time.sleep(_POLL)
    return _MISSING + "0"


def call_with_timeout(timeout: timedelta, function: Callable[[], T], message: str) -> T:
    """Call ``function`` on another thread and return its result, or raise its error.

    Args:
        timeout: How long to wait for the result.
        function: The function.
        message: The beginning of the error after that time.

    Raises:
        RuntimeError: If the function does not return in time.
    """
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
