"""Times of whole micro-batches, compared with the simulation of the schedule.

Here are also the tests of ``action_costs``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from random import Random

import numpy as np
import pytest

from lightning_gpipe.core.planner.action_costs import ActionCosts
from lightning_gpipe.core.planner.stage_cost import MicroBatchCost
from lightning_gpipe.core.planner.waves import Wave, waves
from lightning_gpipe.core.schedules import (
    FILL_DRAIN,
    KINDS,
    Action,
    Kind,
    Pattern,
    Schedule,
    ScheduleKind,
    looped,
)
from tests.support.placements import one_each

Span = tuple[float, float]


def drawn(random: Random, m: int, recomputed: Sequence[int]) -> ActionCosts:
    """Micro-batches of a few sizes, some of whose costs are 0."""

    def cost() -> float:
        return float(random.choice([0, 1, 2, 5, 9]))

    costs = {
        rows: [MicroBatchCost(cost(), cost(), cost(), 1.0, weights=cost()) for _ in recomputed]
        for rows in (1, 2, 3)
    }
    return ActionCosts(costs, random.choices((1, 2, 3), k=m), recomputed, [1.0] * len(recomputed))


def by_simulation(costs: ActionCosts, schedule: Schedule) -> dict[Action, Span]:
    """What the simulator says: a phase starts when the one before has ended."""

    def cost(action: Action) -> float:
        kind, i, j = action
        if not 0 <= j < schedule.n or kind is Kind.LOSS:
            return 0.0
        return float(costs.times(kind, np.array([i]), np.array([j]))[0])

    found: dict[Action, Span] = {}
    at = 0.0
    for k in range(len(schedule.phases)):
        phase = schedule.phase(k).simulate(cost)
        found |= {a: (at + start, at + start + cost(a)) for a, start in phase.start.items()}
        at += phase.makespan
    stages = range(schedule.n)
    return {a: span for a, span in found.items() if a.j in stages and a.kind is not Kind.LOSS}


def by_waves(found: Iterable[Wave]) -> dict[Action, Span]:
    return {
        Action(wave.kind, i, j): (start, end)
        for wave in found
        for i, j, start, end in zip(*(each.tolist() for each in wave[1:]), strict=True)
    }


def in_fill_drain(costs: ActionCosts, *, split: bool = False) -> Iterator[Wave]:
    patterns = FILL_DRAIN.patterns(costs.micro_batches, one_each(costs.stages))
    return waves(patterns, costs, one_loss=True, split=split)


@pytest.mark.parametrize("seed", range(100))
def test_every_action_of_a_drawn_case_has_the_times_of_the_simulation(seed: int) -> None:
    random = Random(seed)
    m, n, split = random.randint(1, 7), random.randint(1, 6), random.random() < 0.5
    recomputed = tuple(random.randint(0, m) for _ in range(n))
    costs = drawn(random, m, recomputed)
    schedule = ScheduleKind(split=split).build(m, one_each(n), recomputed)

    assert by_waves(in_fill_drain(costs, split=split)) == by_simulation(costs, schedule)


@pytest.mark.parametrize("order", KINDS, ids=str)
@pytest.mark.parametrize("seed", range(25))
def test_times_of_any_schedule_are_those_of_the_simulation(order: ScheduleKind, seed: int) -> None:
    random = Random(seed)
    workers = random.randint(1, 5)
    loops = 1 if order.schedule == "zero_bubble" else random.randint(1, 3)
    m = random.randint(1, 7) * (workers if loops > 1 else 1)
    placement = looped(loops * workers, workers)
    recomputed = tuple(random.randint(0, m) for _ in placement)
    costs = drawn(random, m, recomputed)

    schedule = order.build(m, placement, recomputed)
    patterns = order.patterns(m, placement)
    found = waves(patterns, costs, one_loss=not order.by_micro_batch, split=order.split)

    assert by_waves(found) == by_simulation(costs, schedule)


def test_actions_of_each_worker_come_in_its_order() -> None:
    costs = drawn(Random(0), 6, [2, 0, 6, 1, 2, 3])
    order = ScheduleKind("1f1b", split=True)
    schedule = order.build(6, looped(6, 3), (2, 0, 6, 1, 2, 3))

    patterns = order.patterns(6, schedule.placement)
    found = by_waves(waves(patterns, costs, one_loss=False, split=True))

    for worker, row in enumerate(schedule.rows):
        assert [a for a in found if schedule.worker_of(a) == worker] == list(row)


def test_workers_that_wait_for_one_another() -> None:
    costs = drawn(Random(0), 1, [0, 0])
    nobody_first = [Pattern([(0, j)], [(0, j)], 0) for j in (1, 1)]

    with pytest.raises(RuntimeError, match="wait for one another"):
        list(waves(nobody_first, costs, one_loss=False, split=False))


def test_equal_micro_batches_take_the_slowest_stage_once_for_each_but_the_first() -> None:
    stages = [MicroBatchCost(f, f, b, 1.0) for f, b in ((1.0, 2.0), (5.0, 7.0), (2.0, 3.0))]

    *_, last = in_fill_drain(ActionCosts({1: stages}, [1] * 10, [0] * 3, [1.0] * 3))

    assert last.end.max() == (1 + 5 + 2) + 9 * 5 + (2 + 7 + 3) + 9 * 7


def test_no_action_of_a_stage_starts_before_the_one_before_has_ended() -> None:
    """Also by a rounding error: memory over time is counted in this order."""
    random = Random(0)
    stages = [
        MicroBatchCost(random.random(), random.random(), random.random(), 1.0) for _ in range(8)
    ]
    free = np.zeros(8)
    for wave in in_fill_drain(ActionCosts({1: stages}, [1] * 50, [50] * 8, [1.0] * 8)):
        assert (wave.start >= free[wave.j]).all()
        free[wave.j] = wave.end
