"""The exact min-max solver: cut a row of layers so that the slowest stage is as fast as possible.

This is the linear partition problem (Skiena, The Algorithm Design Manual, chapter on dynamic
programming). Heuristics end in local optima, as in 67 % of random rows with torchgpipe's solver.

The best cut of the first e layers into j + 1 runs extends, for some b, the best cut of the first b
layers into j runs by the run b..e-1::

    |<--- best cut into j runs --->|<- one run ->|
    0                              b             e

The cost of a run may be any table over b and e, and another one for each stage: so the solution is
exact with the speeds of devices, transfers between stages, and runs that do not fit the memory.

Of a thousand layers on hundreds of devices, no good cut has long runs. So tables first have runs of
a few layers only. If each longer one takes more time than the best cut of these, that is the best
of all; or else runs of twice as many layers are tried.

Of the optimal cuts the solver takes one whose largest memory is least, and of these the most even
one: least sum of squared times, then least sum of squared numbers of layers, so that layers without
cost are spread too, and then the shorter runs last, where a pipeline also computes the loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import ceil, frexp, inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_gpipe.core.balance.costs import LayerCosts, Place, Transfer, sums_of

Table = NDArray[np.int64]  # at [e, k] the cost of the run of k + 1 layers up to e - 1, or NEVER

# Costs are whole numbers, in a unit of 2^-50 of the largest sum: sums are exact, and so are ties.
NEVER = int(np.iinfo(np.int64).max) // 4  # more than any cost; the sum of two is a number, too
_BITS = 50
_SQUARED = 25  # bits of a number whose square is added to others


class NothingFits(ValueError):
    """No cut fits the memory of the devices.

    Attributes:
        balance: The cut that lacks least on the stage that lacks most.
        missing: The bytes that each of its stages lacks.
    """

    def __init__(self, balance: list[int], missing: list[float]) -> None:
        self.balance = balance
        self.missing = missing
        lacking = ", ".join(
            f"{lack / 2**30:.3g} GiB on stage {j}" for j, lack in enumerate(missing) if lack > 0
        )
        super().__init__(
            "the layers of each stage must fit the memory of its device: no balance of "
            f"{len(balance)} stages does that. The nearest one, {balance}, lacks {lacking}. Use "
            "more devices, or devices with more memory."
        )


def solve(costs: Sequence[float], parts: int) -> list[int]:
    """Cut the costs into ``parts`` contiguous, non-empty runs with the least maximal cost.

    >>> solve([1, 1, 1, 1, 1, 5], parts=2)
    [5, 1]
    >>> solve([1] * 10, parts=4)
    [3, 3, 2, 2]

    Returns:
        The number of layers in each run, first to last; of all optima the most even one.

    Raises:
        ValueError: If a run would be empty, or a cost is negative, infinite or NaN.
    """
    _check_parts(parts, len(costs))
    return solve_on(LayerCosts(costs), [Place()] * parts)


def solve_on(costs: LayerCosts, places: Sequence[Place]) -> list[int]:
    """Cut the layers into a run for each place, so that the slowest one is as fast as possible.

    >>> solve_on(LayerCosts([1] * 9), [Place(), Place(speed=2)])
    [3, 6]
    >>> solve_on(LayerCosts([1] * 4, memory=[8] * 4), [Place(), Place(memory=8)])
    [3, 1]

    Raises:
        ValueError: If a run would be empty.
        NothingFits: If every cut needs more memory than its devices have.
    """
    _check_parts(len(places), len(costs.times))
    if len(places) == len(costs.times):  # one cut only, also of thousands of layers
        sizes = [1] * len(places)
        lacking = list(_missing(costs, places, sizes))
        if any(lacking):
            raise NothingFits(sizes, lacking)
        return sizes
    longest = len(costs.times) - len(places) + 1
    width = min(longest, 2 * ceil(len(costs.times) / len(places)))
    while True:
        sizes, lack, time = _best(_tables_for(costs, places, width), places)
        if width == longest or (not lack and time < _shortest(costs, places, width + 1)):
            break
        width = min(longest, 2 * width)
    if lack:
        raise NothingFits(sizes, list(_missing(costs, places, sizes)))
    return sizes


class _RunTables(NamedTuple):
    """The costs of all runs on a device, those that matter most first."""

    lacking: Table  # memory that the device lacks
    time: Table  # with the transfers
    memory: Table  # that is needed


def _best(
    tables: Mapping[Place, _RunTables], places: Sequence[Place]
) -> tuple[list[int], int, int]:
    """Return the sizes of the runs of the best cut, the most memory that it lacks, and its time."""
    allowed = {place: table.time < NEVER for place, table in tables.items()}
    peaks = []
    for name in _RunTables._fields:  # of the cuts that are best by one, those best by the next
        runs = {p: np.where(allowed[p], getattr(x, name), NEVER) for p, x in tables.items()}
        peaks.append(_least_peak([runs[place] for place in places]))
        allowed = {place: cost <= peaks[-1] for place, cost in runs.items()}
    best = {p: np.where(allowed[p], table.time, NEVER) for p, table in tables.items()}
    return _most_even([best[place] for place in places]), peaks[0], peaks[1]


def _shortest(costs: LayerCosts, places: Sequence[Place], layers: int) -> int:
    """Return a lower bound of the time of a run of at least ``layers`` layers."""
    speed = max(place.speed for place in places)
    times = _whole([time / speed for time in costs.times], _second(costs, places))
    return int(_sums(times, layers)[layers:, -1].min())


def _second(costs: LayerCosts, places: Sequence[Place]) -> float:
    """Return the unit of times."""
    return _unit(
        [
            time / place.speed
            for place in dict.fromkeys(places)
            for time in (place.busy, *costs.times_at(replace(place, extra=max(place.extra, 1))))
        ]
        + [transfer.time for transfer in costs.transfers]
    )


def _tables_for(costs: LayerCosts, places: Sequence[Place], width: int) -> dict[Place, _RunTables]:
    distinct = list(dict.fromkeys(places))
    nothing = [0.0] * len(costs.times)
    memory, live = costs.memory or nothing, costs.live or nothing
    most = max(place.alive for place in distinct)
    second = _second(costs, distinct)
    byte = _unit([*memory, *(most * size for size in live), *(place.taken for place in distinct)])
    crossing = _crossing(costs.transfers, len(costs.times), width, second)
    tables = {}
    for place in distinct:
        limit = NEVER if place.memory == inf else min(NEVER, int(place.memory / byte))
        held = _sums(_whole(memory, byte), width) + _whole([place.taken], byte)
        time = _sums(_whole([time / place.speed for time in costs.times_at(place)], second), width)
        if place.micro_batches:
            each = _sums(_whole(live, byte), width)
            alive = _alive(place, limit - held, each)
            kept = alive - place.least + 1
            again = np.where(alive < place.alive, 1 - kept / place.micro_batches, 0.0)
            extra = _sums(_whole([t / place.speed for t in costs.extra], second), width)
            time += np.rint(again * extra).astype(np.int64)
            needed = held + np.rint(alive * each).astype(np.int64)
        else:
            needed = held + _sums(_whole([place.alive * size for size in live], byte), width)
        tables[place] = _RunTables(
            _runs(np.maximum(needed - limit, 0)),
            _runs(time + crossing + _whole([place.busy], second)),
            _runs(needed),
        )
    return tables


def _alive(place: Place, room: Table, each: Table) -> NDArray[np.float64]:
    """Return how many micro-batches, of ``each`` bytes, stay alive in each run: as many as fit."""
    more = np.floor(room / np.maximum(each, 1) - place.least)
    return np.clip(place.least + more, place.least, place.alive)


def _unit(numbers: Sequence[float]) -> float:
    """Return a power of two in which sums of the numbers have at most 50 bits."""
    _, exponent = frexp(float(sum(numbers)))
    return float(2.0 ** (exponent - _BITS))


def _whole(numbers: Sequence[float], unit: float) -> NDArray[np.int64]:
    return np.rint(np.asarray(numbers, dtype=np.float64) / unit).astype(np.int64)


def _sums(costs: NDArray[np.int64], width: int) -> Table:
    """At [e, k] the sum of the k + 1 costs up to e - 1."""
    sums = np.concatenate([[0], np.cumsum(costs)])
    return sums[:, None] - _before(sums, width, beyond=0)


def _before(numbers: NDArray[np.int64], width: int, beyond: int = NEVER) -> Table:
    """At [e, k] the number k + 1 places before e; ``beyond`` before the first."""
    padded = np.concatenate([np.full(width, beyond), numbers[:-1]])
    size = padded.itemsize  # a view, without the calls in Python of sliding_window_view
    return np.ndarray(
        (len(numbers), width), padded.dtype, padded, (width - 1) * size, (size, -size)
    )


def _crossing(transfers: Sequence[Transfer], n: int, width: int, unit: float) -> Table:
    """At [e, k] the time of the transfers that enter the run of k + 1 layers up to e - 1.

    The runs of a length that a value enters end at neighbouring layers: it adds to the first and
    takes from the one after the last, and sums are taken at the end.
    """
    changes, length = np.zeros((n + 2, width), dtype=np.int64), np.arange(1, width + 1)
    times = _whole([transfer.time for transfer in transfers], unit)[:, None]
    ends = np.array([transfer[:2] for transfer in transfers], dtype=np.int64).reshape(-1, 2, 1)
    maker, user = ends[:, 0], ends[:, 1]
    first, after = np.maximum(maker, user - length) + 1 + length, user + length + 1
    for end, change in ((first, times), (after, -times)):
        np.add.at(changes, (end.clip(max=n + 1), length - 1), change)
    return changes.cumsum(axis=0)[: n + 1]


def _runs(table: Table) -> Table:
    """The table, with ``NEVER`` where there is no run: none begins before the first layer."""
    table[np.arange(len(table))[:, None] <= np.arange(table.shape[1])] = NEVER
    return table


def _least_peak(tables: Sequence[Table]) -> int:
    """The largest cost of a stage in the best cut, by the table of each stage."""
    best = np.full(len(tables[0]), NEVER)
    best[0] = 0
    for table in tables:
        best = np.maximum(table, _before(best, table.shape[1])).min(axis=1)
    return int(best[-1])


def _most_even(tables: Sequence[Table]) -> list[int]:
    """The sizes of the runs of the most even cut without forbidden ones."""
    distinct = list({id(table): table for table in tables}.values())  # equal places share one
    longest = max(1 + int(np.nonzero(table < NEVER)[1].max()) for table in distinct)
    most = max(int(table[table < NEVER].max()) for table in distinct)
    shift = max(0, most.bit_length() - _SQUARED)
    squares = np.arange(1, longest + 1) ** 2
    uneven = np.full(len(tables[0]), NEVER)
    uneven[0] = 0
    spread = uneven.copy()
    chosen: list[NDArray[np.int64]] = []
    for table in tables:
        runs = table[:, :longest]
        price = np.where(runs < NEVER, (runs >> shift) ** 2 + _before(uneven, longest), NEVER)
        uneven = price.min(axis=1).clip(max=NEVER)
        even = np.where(price == uneven[:, None], squares + _before(spread, longest), NEVER)
        spread = even.min(axis=1).clip(max=NEVER)
        chosen.append((even == spread[:, None]).argmax(axis=1))  # the shortest of the best
    return _sizes(chosen)


def _sizes(chosen: Sequence[NDArray[np.int64]]) -> list[int]:
    """The sizes of the runs, by the last one for each stage and number of layers so far."""
    end, sizes = len(chosen[0]) - 1, []
    for last in reversed(chosen):
        sizes.append(int(last[end]) + 1)
        end -= sizes[-1]
    return sizes[::-1]


def _missing(costs: LayerCosts, places: Sequence[Place], sizes: Sequence[int]) -> Iterator[float]:
    nothing = [0] * len(costs.times)
    memory, live = (sums_of(each or nothing, sizes) for each in (costs.memory, costs.live))
    for place, held, each in zip(places, memory, live, strict=True):
        alive = place.least if place.micro_batches else place.alive
        yield max(0.0, place.taken + (held + alive * each) - place.memory)


def _check_parts(parts: int, n: int) -> None:
    if not 1 <= parts <= n:
        raise ValueError(
            "parts must be between 1 and the number of costs, so that no part is empty: "
            f"got parts={parts} for {n} costs. Use fewer parts."
        )
