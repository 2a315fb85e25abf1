"""Holds skip tensors between the layer that stashes them and the one that pops them.

The table of skip tensors is thread-local. In a plain nn.Sequential a tensor stays in it from stash
to pop. A pipeline uses a table for each micro-batch and stage, and sends the tensors that remain in
it to the stages that pop them.
"""

from __future__ import annotations

import threading
from typing import Any

from lightning_gpipe.core.programs import RouteName

Table = dict[RouteName, Any]


class _Threads(threading.local):
    def __init__(self) -> None:
        self.table: Table = {}


_threads = _Threads()


def in_flight() -> Table:
    """Return the calling thread's skip tensors, by name."""
    return _threads.table


class using_table:
    """Let layers stash to and pop from ``table`` in a ``with`` block."""

    # A class takes half the time of a generator; it is entered for every action.

    def __init__(self, table: Table) -> None:
        self._table = table

    def __enter__(self) -> None:
        self._before = _threads.table
        _threads.table = self._table

    def __exit__(self, *_: object) -> None:
        _threads.table = self._before
