"""Finds the fastest schedule for the costs of actions within the memory of the devices.

Schedules with names suit actions that take equally long, and hold as much as they hold. A local
search finds a good block for the costs at hand. Both compete, by the prediction of the whole
schedule: the simplest of the fastest that fit is chosen.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, get_args

import numpy as np

from lightning_gpipe.core.balance import Place
from lightning_gpipe.core.planner.action_costs import ActionCosts
from lightning_gpipe.core.planner.block_search import BlockSearch, StageNumbers
from lightning_gpipe.core.planner.prediction import Prediction
from lightning_gpipe.core.planner.row_actions import (
    BACKWARD,
    FORWARD,
    WEIGHTS,
    RowActions,
    row_actions,
)
from lightning_gpipe.core.planner.stage_cost import MicroBatchCost, costs_of
from lightning_gpipe.core.planner.waves import waves_of
from lightning_gpipe.core.schedules import SCHEDULES, ByMicroBatch, ScheduleKind

_LARGEST = 1024  # actions of one kind: the search simulates each of them, thousands of times
_GAIN = 0.005  # the share of the time that a block must save, which is harder to read than a name


class FittingSchedule(NamedTuple):
    """A schedule that fits; ``peaks`` are the bytes that each worker holds for backwards."""

    kind: ScheduleKind
    time: float
    peaks: tuple[float, ...]


def fastest_schedule(
    m: int,
    placement: tuple[int, ...],
    costs: Mapping[bool, Sequence[MicroBatchCost]],
    memory: Sequence[float],
    *,
    places: Sequence[Place] = (),
    tries: int = 20_000,
) -> FittingSchedule | None:
    """Return the fastest schedule that fits, with a loss for each micro-batch; None if none fits.

    It is never slower than one with a name that fits, and the same for the same arguments.

    Args:
        m: The number of micro-batches, which cost the same. None is recomputed.
        costs: The costs of each stage, with whole backwards at the key False, and with split ones
            at True. Either may be left out.
        memory: The bytes that each worker has for what it holds for backwards.
        places: The devices of the stages, all of speed 1 by default.
        tries: The number of blocks to try with whole backwards, and as many with split ones.
    """
    n = len(placement)
    actions = {
        split: ActionCosts({1: stages}, [1] * m, [0] * n, places or [Place()] * n)
        for split, stages in costs.items()
    }
    kinds = [kind for kind in _named(sorted(costs)) if kind.possible(m, placement)]
    known = [kind.definition.block for kind in kinds]
    blocks = [block(len(memory)) for block in known if block is not None]
    for split in costs:
        search = BlockSearch(m, placement, *_by_stage(actions[split]), tuple(memory), split)
        kinds += (ScheduleKind(block, split) for block in search.climbs(blocks, tries))
    judged = (_judged(kind, m, placement, actions[kind.split]) for kind in kinds)
    fitting = [
        each
        for each in judged
        if all(most <= room for most, room in zip(each.peaks, memory, strict=True))
    ]
    return min(fitting, key=lambda each: float(f"{each.time:.9g}"), default=None)


def with_block(plan: Prediction, splits: Collection[bool]) -> Prediction:
    """Return a plan with a block in the place of its schedule, or the plan if that is as fast.

    The block recomputes nothing. Large plans, and plans with more stages than devices, or with
    something on the host, stay as they are.
    """
    settings, rows = plan.settings, max(plan.rows)
    n, m = settings.stages, settings.chunks
    elsewhere = settings.offload_activations or settings.has_visits
    if elsewhere or not n == len(plan.workers) > 1 or n * m > _LARGEST:
        return plan
    costs = {split: costs_of(plan.profile, settings.balance, rows, split=split) for split in splits}
    room = [plan.room[device] for device in plan.workers]
    found = fastest_schedule(m, plan.placement, costs, room, places=plan.places)
    if found is None or isinstance(found.kind.schedule, str):
        return plan
    block = replace(plan, settings=settings._replace(order=found.kind, recomputed=(0,) * n))
    faster = block.time < (1 - _GAIN) * plan.time
    return block if faster and not any(block.missing) else plan


def _by_stage(costs: ActionCosts) -> tuple[StageNumbers, StageNumbers]:
    """Return the times of each stage's F, B and W, and the bytes that they add."""
    kinds, stages = np.meshgrid(np.array([FORWARD, BACKWARD, WEIGHTS]), np.arange(costs.stages))
    row = kinds.size
    actions = RowActions(kinds.ravel(), np.zeros(row, int), stages.ravel(), np.array([0, row]))
    numbers = (costs.times(actions), costs.total_changes(actions))
    times, changes = (array.reshape(kinds.shape).tolist() for array in numbers)
    return times, changes


def _named(splits: Sequence[bool]) -> Iterator[ScheduleKind]:
    """Yield the kinds of the table with a loss for each micro-batch, the simplest first."""
    for name in get_args(ByMicroBatch):
        for split in splits:
            if split or not SCHEDULES[name].always_split:
                yield ScheduleKind(name, split)


def _judged(
    kind: ScheduleKind, m: int, placement: tuple[int, ...], costs: ActionCosts
) -> FittingSchedule:
    """Return a schedule with its time and its peaks; it need not fit."""
    schedule = kind, m, placement, (0,) * len(placement)
    peaks = tuple(costs.peak_of(row) for row in row_actions(*schedule).rows())
    return FittingSchedule(kind, waves_of(*schedule).makespan(costs), peaks)
