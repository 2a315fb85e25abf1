"""Where skip tensors are between the layer that stashes them and the one that pops them.

Layers run one after another on one thread, so what is in flight belongs to the thread. In a plain
nn.Sequential it stays there from stash to pop. A pipeline lays a table of its own for each
micro-batch on each stage, and carries what is left on it to the stage that needs it.
"""

from __future__ import annotations

import threading
from typing import NamedTuple
from uuid import UUID

from torch import Tensor


class SkipName(NamedTuple):
    """A name within a namespace, or within none."""

    namespace: UUID | None
    name: str

    def __str__(self) -> str:
        return repr(self.name) if self.namespace is None else f"{self.name!r} (isolated)"


Table = dict[SkipName, Tensor | None]


class _Threads(threading.local):
    def __init__(self) -> None:
        self.table: Table = {}


_threads = _Threads()


def in_flight() -> Table:
    """The calling thread's skip tensors, by name."""
    return _threads.table


class carrying:
    """Lets layers put and find skip tensors in ``table`` for the duration of a ``with`` block."""

    # A class: it is entered for every action, and costs half of what a generator does.

    def __init__(self, table: Table) -> None:
        self._table = table

    def __enter__(self) -> None:
        self._before = _threads.table
        _threads.table = self._table

    def __exit__(self, *_: object) -> None:
        _threads.table = self._before
