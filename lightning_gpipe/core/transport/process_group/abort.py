"""Ends waits for other processes that are in vain: those of a process group, or of the user's code.

A wait for a process that is stopped, or that no network reaches, ends with the timeout of its
process group, which is as long as the user is patient. Over Gloo only one thing ends it sooner:
when any wait in a group times out, all waits in that group end. It must be a wait for a process
that is connected: else Gloo would connect first, and end this process if that fails afterwards.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary, WeakMethod

import torch
from torch.distributed import DistError, ProcessGroup
from torch.distributed.distributed_c10d import ProcessGroupGloo

_TAG = 7_299  # nobody sends with it
_JOIN = 5.0  # seconds
_GLOO = ("gloo", "pair closure")  # in its messages, for its errors have no type of their own


# Of the groups whose processes connect on demand, the ranks that are connected.
_CONNECTED: WeakKeyDictionary[ProcessGroup, Collection[int]] = WeakKeyDictionary()


def set_connected(group: ProcessGroup, ranks: Collection[int]) -> None:
    """Record which ranks of a group are connected with this one, for :func:`abort_group`."""
    _CONNECTED[group] = ranks


def abort_group(group: ProcessGroup) -> None:
    """End all waits in a process group with errors; the group is unusable then."""
    for device in group._device_types:
        backend = group._get_backend(device)
        if isinstance(backend, ProcessGroupGloo):
            # Each rank is tried: a wait for one that has closed fails, but does not time out.
            others = set(range(group.size())).difference([group.rank()])
            gloo: Any = backend  # the stubs have no recv
            for rank in _CONNECTED.get(group, others):
                with suppress(RuntimeError):
                    gloo.recv([torch.empty(1)], rank, _TAG).wait(timedelta(milliseconds=1))
        else:
            with suppress(RuntimeError):
                backend.abort()


def is_broken_connection(error: BaseException) -> bool:
    """Return True for an error of torch.distributed, which names no process."""
    return isinstance(error, DistError) or (
        type(error) is RuntimeError and any(each in str(error) for each in _GLOO)
    )


class UserCollectives:
    """Aborts waits that are in vain: a process is lost, or its failure goes unnoticed here.

    The next exchange notices a failure. A process that begins none for as long as another one may
    be silent either waits for the process that has failed, or is busy with something else.
    """

    def __init__(self) -> None:
        self._aborts: set[WeakMethod[Callable[[], None]]] = set()
        self._beats = 0  # since there is a failure that is unnoticed
        self._threads: list[threading.Thread] = []

    def add(self, abort: Callable[[], None]) -> None:
        """Add a method that aborts some waits, for as long as its object lives."""
        self._aborts.add(WeakMethod(abort))

    def abort(self) -> None:
        """Abort the waits, on another thread, so that heartbeats go on meanwhile."""
        if self._aborts:
            thread = threading.Thread(target=self._abort, name="gpipe-end-waits", daemon=True)
            self._threads.append(thread)
            thread.start()

    def join(self) -> None:
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_JOIN)

    def beat(self, limit: int, *, unnoticed: bool, in_vain: bool) -> None:
        """Abort the waits if a failure is unnoticed for ``limit`` beats, or they are in vain."""
        before = self._beats
        self._beats = max(before + 1, limit * in_vain) if unnoticed else 0
        if before < limit <= self._beats:
            self.abort()

    def _abort(self) -> None:
        for reference in list(self._aborts):
            abort = reference()
            if abort is not None:
                abort()
