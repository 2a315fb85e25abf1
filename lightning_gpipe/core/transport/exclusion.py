"""Mutual exclusion of mini-batches that use the same layers.

If two of the user's threads ran mini-batches at once, they would wait for one another's workers,
and see the other's changes to the layers. So they take turns, even in different pipelines of the
same layers. After a run has failed, the next one also waits for actions that have not ended.

A worker runs its layers for a thread that waits for it, and the two count as one. So a layer can
contain another pipeline, whose layers are then layers of both.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from weakref import WeakKeyDictionary

from torch import nn

from lightning_gpipe.core.faithful import Closing
from lightning_gpipe.core.layout import Layout
from lightning_gpipe.core.transport.threads import lineage


class _Turn:
    """A reentrant lock and its owner; workers count as the thread that waits for them."""

    def __init__(self) -> None:
        self._renew()

    def _renew(self) -> None:
        self._forks = _REGISTRY.forks
        self._lock = threading.RLock()
        self.owner: threading.Thread | None = None

    @property
    def lock(self) -> AbstractContextManager[bool]:
        if self._forks != _REGISTRY.forks:
            self._renew()  # the thread that holds the lock is not in this process
        return self._lock


class _Registry:
    """The turn of each module; ``forks`` counts those since the process that imported this."""

    def __init__(self) -> None:
        self.forks = 0
        self._lock = threading.Lock()
        self._turn_of: WeakKeyDictionary[nn.Module, _Turn] = WeakKeyDictionary()

    def count_fork(self) -> None:
        self.forks += 1

    def turns_of(self, *layouts: Layout) -> list[_Turn]:
        """Return the turns of all modules in the layers, in the same order for every pipeline."""
        partitions = (partition for layout in layouts for partition in layout.partitions)
        modules = {module for partition in partitions for module in partition.modules}
        with self._lock:
            known_turns = {turn for module in modules if (turn := self._turn_of.get(module))}
            turns = sorted(known_turns or {_Turn()}, key=id)
            for module in modules:
                self._turn_of.setdefault(module, turns[0])
        return turns


# State of the process: pipelines of the same layers know nothing of one another, and what is stored
# in the layers themselves would be saved with them.
_REGISTRY = _Registry()

if sys.platform != "win32":
    os.register_at_fork(after_in_child=_REGISTRY.count_fork)


class Exclusion:
    """Lets one thread at a time run mini-batches with the layers of some layouts; reentrant."""

    def __init__(self, *layouts: Layout, before: Callable[[], None] = lambda: None) -> None:
        self._layouts = layouts
        self._turns: tuple[_Turn, ...] = ()
        self._own = _Turn()
        self._before = before

    def entered(self) -> AbstractContextManager[None]:
        if not self._turns:
            # Not by the constructor: a copy is made while its layers are being copied.
            self._turns = tuple(_REGISTRY.turns_of(*self._layouts))
        turns = self._turns
        thread, *callers = lineage()
        if callers and any(turn.owner in callers for turn in turns):
            # Several workers of that pipeline may come: they take turns among themselves.
            turns = (*[turn for turn in turns if turn.owner not in callers], self._own)
        return Closing(self._hold(turns, thread))

    def _hold(
        self, turns: Sequence[_Turn], thread: threading.Thread
    ) -> Generator[None, None, None]:
        turn, *others = turns
        with turn.lock:
            before, turn.owner = turn.owner, thread
            try:
                if others:
                    yield from self._hold(others, thread)
                else:
                    self._before()
                    yield
            finally:
                turn.owner = before
