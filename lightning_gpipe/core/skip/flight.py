"""Where skip tensors are between the layer that stashes them and the one that pops them.

Layers run one after another on one thread, so what is in flight belongs to the thread. In a plain
nn.Sequential it stays there from stash to pop. A pipeline gives each micro-batch on each stage a
table of its own, and sends what is left on it to the stage that needs it.
"""

from __future__ import annotations

import threading

from torch import Tensor

from lightning_gpipe.core.plan import SkipName

Table = dict[SkipName, Tensor | None]


class _Threads(threading.local):
    def __init__(self) -> None:
        self.table: Table = {}


_threads = _Threads()


def in_flight() -> Table:
    """The calling thread's skip tensors, by name."""
    return _threads.table


class using_table:
    """Lets layers stash to and pop from ``table`` for the duration of a ``with`` block."""

    # A class: it is entered for every action, and costs half of what a generator does.

    def __init__(self, table: Table) -> None:
        self._table = table

    def __enter__(self) -> None:
        self._before = _threads.table
        _threads.table = self._table

    def __exit__(self, *_: object) -> None:
        _threads.table = self._before
