"""Tables of the costs of every run of layers on a device, in whole numbers.

A table has at [e, b] the cost of the run b..e-1, and ``NEVER`` where that is no run. Numbers are
whole, in a unit of 2^-50 of the largest possible sum, so sums are exact, and so are ties.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import frexp, inf

import numpy as np
from numpy.typing import NDArray

from lightning_gpipe.core.balance.costs import LayerCosts, Place, Transfer

Table = NDArray[np.int64]  # of shape (layers + 1, layers + 1)

NEVER = int(np.iinfo(np.int64).max) // 4  # more than any cost; the sum of two is a number, too
_BITS = 50  # of the largest sum


@dataclass(frozen=True)
class RunTables:
    """The costs of all runs on a device.

    Attributes:
        time: The time of each run, with its transfers.
        memory: The memory that it needs.
        lacking: The memory that the device lacks for it; 0 if it fits.
    """

    time: Table
    memory: Table
    lacking: Table


def tables_for(costs: LayerCosts, places: Iterable[Place]) -> dict[Place, RunTables]:
    """Return the tables of each place."""
    distinct = list(dict.fromkeys(places))
    memory = costs.memory or [0] * len(costs.times)
    live = costs.live or [0] * len(costs.times)
    alive = {place: [place.alive * size for size in live] for place in distinct}
    in_time = _Unit(
        [time / place.speed for place in distinct for time in costs.times]
        + [place.busy for place in distinct]
        + [transfer.time for transfer in costs.transfers]
    )
    most = max(distinct, key=lambda place: place.alive)
    in_bytes = _Unit([*memory, *alive[most], *(place.taken for place in distinct)])
    crossing = _crossing(costs.transfers, len(costs.times), in_time)
    held = _sums(in_bytes.whole(memory))
    tables = {}
    for place in distinct:
        time = _sums(in_time.whole([time / place.speed for time in costs.times])) + crossing
        needed = held + _sums(in_bytes.whole(alive[place])) + in_bytes.whole([place.taken])
        limit = NEVER if place.memory == inf else min(NEVER, int(place.memory / in_bytes.size))
        tables[place] = RunTables(
            _runs(time + in_time.whole([place.busy])),
            _runs(needed),
            _runs(np.maximum(needed - limit, 0)),
        )
    return tables


class _Unit:
    """A power of two in which sums of the numbers have at most 50 bits."""

    def __init__(self, numbers: Sequence[float]) -> None:
        _, exponent = frexp(float(sum(numbers)))
        self.size = 2.0 ** (exponent - _BITS)

    def whole(self, numbers: Sequence[float]) -> NDArray[np.int64]:
        """Return the numbers in this unit, rounded."""
        return np.rint(np.asarray(numbers, dtype=np.float64) / self.size).astype(np.int64)


def _sums(costs: NDArray[np.int64]) -> Table:
    """At [e, b] the sum of the costs b..e-1."""
    sums = np.concatenate([[0], np.cumsum(costs)])
    return sums[:, None] - sums[None, :]


def _crossing(transfers: Sequence[Transfer], n: int, unit: _Unit) -> Table:
    """At [e, b] the time of the transfers that enter or leave the run b..e-1."""
    crossing = np.zeros((n + 1, n + 1), dtype=np.int64)
    times = unit.whole([transfer.time for transfer in transfers])
    for (maker, user, _, sent), time in zip(transfers, times, strict=True):
        crossing[user + 1 :, maker + 1 : user + 1] += time  # it enters
        if sent:
            crossing[maker + 1 : user + 1, : maker + 1] += time  # it leaves
    return crossing


def _runs(table: Table) -> Table:
    """The table, with ``NEVER`` where there is no run: e must be greater than b."""
    table[np.triu_indices(len(table))] = NEVER
    return table
