"""Finds the fastest schedule for the costs of actions within the memory of the devices.

The schedules with names suit actions that take equally long, and hold as much as they hold. A block
may be any order that repeats, so there is one for the costs at hand, and a local search finds a
good one. Both compete, by the simulation of the whole schedule: the fastest that fits is chosen, or
the simplest of those that are as fast.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, get_args

from lightning_gpipe.core.planner.block_search import BlockSearch, StageNumbers, peak
from lightning_gpipe.core.planner.stage_cost import MicroBatchCost
from lightning_gpipe.core.schedules import SCHEDULES, Action, ByMicroBatch, Kind, ScheduleKind

_COLUMNS = {Kind.FORWARD: 0, Kind.BACKWARD: 1, Kind.WEIGHTS: 2}  # of a block


class FittingSchedule(NamedTuple):
    """A schedule that fits the memory of the devices.

    Attributes:
        kind: The schedule, by its name or as a block, with whole or with split backwards.
        time: The time of a mini-batch, in the unit of the costs.
        peaks: The bytes that each worker holds for backwards at its peak.
    """

    kind: ScheduleKind
    time: float
    peaks: tuple[float, ...]


def fastest_schedule(
    m: int,
    placement: tuple[int, ...],
    costs: Mapping[bool, Sequence[MicroBatchCost]],
    memory: Sequence[float],
    *,
    tries: int = 20_000,
) -> FittingSchedule | None:
    """Return the fastest schedule that fits, of those with a loss for each micro-batch.

    It is never slower than one with a name that fits, and the same for the same arguments.

    Args:
        m: The number of micro-batches, which cost the same. None is recomputed.
        placement: The worker of each stage; each has as many stages.
        costs: The costs of each stage on its device, as by :func:`costs_of`: with whole backwards
            at the key False, and with split ones at True. Either may be left out.
        memory: The bytes that each worker has for what it holds for backwards.
        tries: The number of blocks to try with whole backwards, and as many with split ones.

    Returns:
        The schedule; None if none fits.
    """
    times = {split: list(map(_times, each)) for split, each in costs.items()}
    changes = {split: list(map(_changes, each)) for split, each in costs.items()}
    kinds = [kind for kind in _named(sorted(costs)) if kind.possible(m, placement)]
    known = [kind.definition.block for kind in kinds]
    blocks = [block(len(memory)) for block in known if block is not None]
    for split in costs:
        search = BlockSearch(m, placement, times[split], changes[split], tuple(memory), split)
        kinds += (ScheduleKind(block, split) for block in search.climbs(blocks, tries))
    judged = (_judged(kind, m, placement, times[kind.split], changes[kind.split]) for kind in kinds)
    fitting = [
        each
        for each in judged
        if all(most <= room for most, room in zip(each.peaks, memory, strict=True))
    ]
    return min(fitting, key=lambda each: float(f"{each.time:.9g}"), default=None)


def _times(cost: MicroBatchCost) -> tuple[float, ...]:
    return cost.forward, cost.backward, cost.weights


def _changes(cost: MicroBatchCost) -> tuple[float, ...]:
    """Return the bytes that F adds at its start, and that B and W add at their ends."""
    held = cost.saved + cost.entering
    return held, cost.left - held, -cost.left


def _named(splits: Sequence[bool]) -> Iterator[ScheduleKind]:
    """Yield the kinds of the table with a loss for each micro-batch, the simplest first."""
    for name in get_args(ByMicroBatch):
        for split in splits:
            if split or not SCHEDULES[name].always_split:
                yield ScheduleKind(name, split)


def _judged(
    kind: ScheduleKind,
    m: int,
    placement: tuple[int, ...],
    times: StageNumbers,
    changes: StageNumbers,
) -> FittingSchedule:
    """Return a schedule with its time and its peaks; it need not fit."""
    schedule = kind.build(m, placement)

    def time(action: Action) -> float:
        return 0.0 if action.by_caller else times[action.j][_COLUMNS[action.kind]]

    peaks = (peak(changes[a.j][_COLUMNS[a.kind]] for a in row) for row in schedule.rows)
    return FittingSchedule(kind, schedule.simulate(time).makespan, tuple(peaks))
