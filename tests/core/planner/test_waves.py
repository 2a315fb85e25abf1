"""Times of whole micro-batches, compared with the simulation of the schedule.

Here are also the tests of ``action_costs`` and ``row_actions``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from lightning_gpipe.core.balance import Place
from lightning_gpipe.core.planner.action_costs import ActionCosts
from lightning_gpipe.core.planner.row_actions import ROW_KINDS, RowActions, row_actions
from lightning_gpipe.core.planner.stage_cost import MicroBatchCost
from lightning_gpipe.core.planner.waves import Waves, waves_of
from lightning_gpipe.core.schedules import (
    FILL_DRAIN,
    KINDS,
    Action,
    ByMicroBatch,
    Kind,
    Schedule,
    ScheduleKind,
    folded,
    looped,
    weight_moves,
)
from lightning_gpipe.core.schedules.host_moves import WeightMoves
from tests.support.placements import one_each

Span = tuple[float, float]


def drawn(
    random: Random,
    m: int,
    recomputed: Sequence[int],
    transfers: Sequence[tuple[float, float]] = (),
) -> ActionCosts:
    """Micro-batches of a few sizes, some of whose costs are 0."""

    def cost() -> float:
        return float(random.choice([0, 1, 2, 5, 9]))

    costs = {
        rows: [MicroBatchCost(cost(), cost(), cost(), 1.0, weights=cost()) for _ in recomputed]
        for rows in (1, 2, 3)
    }
    rows, places = random.choices((1, 2, 3), k=m), [Place()] * len(recomputed)
    return ActionCosts(costs, rows, recomputed, places, transfers=transfers)


def time_of(costs: ActionCosts, action: Action) -> float:
    kind, i, j = np.array([[ROW_KINDS.index(action.kind)], [action.i], [action.j]], dtype=np.int32)
    return float(costs.times(RowActions(kind, i, j, np.array([0, 1])))[0])


def by_simulation(costs: ActionCosts, schedule: Schedule) -> dict[Action, Span]:
    """What the simulator says: a phase starts when the one before has ended."""

    def cost(action: Action) -> float:
        if not 0 <= action.j < schedule.n or action.kind is Kind.LOSS:
            return 0.0
        return time_of(costs, action)

    found: dict[Action, Span] = {}
    at = 0.0
    for k in range(len(schedule.phases)):
        phase = schedule.phase(k).simulate(cost)
        found |= {a: (at + start, at + start + cost(a)) for a, start in phase.start.items()}
        at += phase.makespan
    stages = range(schedule.n)
    return {a: span for a, span in found.items() if a.j in stages and a.kind is not Kind.LOSS}


def by_waves(
    order: ScheduleKind, costs: ActionCosts, placement: tuple[int, ...], recomputed: tuple[int, ...]
) -> dict[Action, Span]:
    """The times of all actions, but for recomputations of which there is no need."""
    schedule = order, costs.micro_batches, placement, recomputed
    kinds, i, j, _ = (numbers.tolist() for numbers in row_actions(*schedule))
    actions = (Action(ROW_KINDS[kind], *visit) for kind, *visit in zip(kinds, i, j, strict=True))
    times = zip(*(each.tolist() for each in waves_of(*schedule).timing(costs)), strict=True)
    return {
        action: span
        for action, span in zip(actions, times, strict=True)
        if action.kind is not Kind.RECOMPUTE or action.i < recomputed[action.j]
    }


@pytest.mark.parametrize("seed", range(100))
def test_every_action_of_a_drawn_case_has_the_times_of_the_simulation(seed: int) -> None:
    random = Random(seed)
    m, n, split = random.randint(1, 7), random.randint(1, 6), random.random() < 0.5
    recomputed = tuple(random.randint(0, m) for _ in range(n))
    costs = drawn(random, m, recomputed)
    schedule = ScheduleKind(split=split).build(m, one_each(n), recomputed)

    found = by_waves(ScheduleKind(split=split), costs, one_each(n), recomputed)
    assert found == by_simulation(costs, schedule)


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

    assert by_waves(order, costs, placement, recomputed) == by_simulation(costs, schedule)


@pytest.mark.parametrize("name", ["zero_bubble_v", "v_half", "v_min"])
@pytest.mark.parametrize("seed", range(25))
def test_times_of_a_folded_schedule_are_those_of_the_simulation(
    name: ByMicroBatch, seed: int
) -> None:
    random = Random(seed)
    order, m, workers = ScheduleKind(name, split=True), random.randint(1, 7), random.randint(1, 4)
    placement = folded(2 * workers, workers)
    recomputed = tuple(random.randint(0, m) for _ in placement)
    costs = drawn(random, m, recomputed)

    schedule = order.build(m, placement, recomputed)

    assert by_waves(order, costs, placement, recomputed) == by_simulation(costs, schedule)


def test_actions_of_each_worker_come_in_its_order() -> None:
    recomputed = (2, 0, 6, 1, 2, 3)
    costs = drawn(Random(0), 6, recomputed)
    order = ScheduleKind("1f1b", split=True)
    schedule = order.build(6, looped(6, 3), recomputed)

    found = by_waves(order, costs, schedule.placement, recomputed)

    for worker, row in enumerate(schedule.rows):
        assert [a for a in found if schedule.worker_of(a) == worker] == list(row)


def test_workers_that_wait_for_one_another() -> None:
    j = np.array([1, 1, 1, 1], dtype=np.int32)
    kinds = np.array([0, 2, 0, 2], dtype=np.int32)
    nobody_first = RowActions(kinds, np.zeros_like(j), j, np.array([0, 2, 4]))

    with pytest.raises(RuntimeError, match="wait for one another"):
        Waves(nobody_first, one_loss=False, from_host=False)


def test_equal_micro_batches_take_the_slowest_stage_once_for_each_but_the_first() -> None:
    stages = [MicroBatchCost(f, f, b, 1.0) for f, b in ((1.0, 2.0), (5.0, 7.0), (2.0, 3.0))]

    costs = ActionCosts({1: stages}, [1] * 10, [0] * 3, [Place()] * 3)

    time = waves_of(FILL_DRAIN, 10, one_each(3), (0,) * 3).makespan(costs)

    assert time == (1 + 5 + 2) + 9 * 5 + (2 + 7 + 3) + 9 * 7


def test_no_action_of_a_stage_starts_before_the_one_before_has_ended() -> None:
    """Also by a rounding error: memory over time is counted in this order."""
    random = Random(0)
    stages = [
        MicroBatchCost(random.random(), random.random(), random.random(), 1.0) for _ in range(8)
    ]
    costs, recomputed = ActionCosts({1: stages}, [1] * 50, [50] * 8, [Place()] * 8), (50,) * 8
    free = [0.0] * 8
    for action, (start, end) in by_waves(FILL_DRAIN, costs, one_each(8), recomputed).items():
        assert start >= free[action.j]
        free[action.j] = end


def with_weights_from_the_host(schedule: Schedule, costs: ActionCosts) -> float:
    """How long the schedule takes with the moves of weights that a worker makes."""
    assert costs.transfers is not None
    load, home = costs.transfers.T
    moves = [weight_moves(row) for row in schedule.rows]
    last = {a.j: a for row in schedule.rows for a in row if a.kind in (Kind.BACKWARD, Kind.WEIGHTS)}
    waiting = [list(reversed(row)) for row in schedule.rows]
    free, coming, going = ([0.0] * schedule.workers for _ in range(3))
    there: dict[int, float] = {}
    asked: set[Action] = set()
    end: dict[Action, float] = {}
    present = {action for row in schedule.rows for action in row}
    while any(waiting):
        before = len(end)
        for w, queue in enumerate(waiting):
            while queue:
                action = queue[-1]
                if action not in asked:  # a worker asks before it waits for what comes in
                    asked.add(action)
                    for j in moves[w].get(action, WeightMoves()).loads:
                        there[j] = coming[w] = max(coming[w], free[w]) + load[j]
                needed = [each for each in schedule.needs(action) if each in present]
                if not all(each in end for each in needed):
                    break
                j = queue.pop().j
                start = max([free[w], there[j], *(end[each] for each in needed)])
                free[w] = end[action] = start + time_of(costs, action)
                if last[j] == action:
                    going[w] = max(going[w], free[w]) + home[j]
        assert len(end) > before, "a schedule ends"
    return max(*free, *going)


@pytest.mark.parametrize("order", KINDS, ids=str)
@pytest.mark.parametrize("seed", range(25))
def test_waits_for_weights_are_those_of_the_moves_of_workers(
    order: ScheduleKind, seed: int
) -> None:
    random = Random(seed)
    workers = random.randint(1, 3)
    loops = 1 if order.schedule == "zero_bubble" else random.randint(1, 4)
    m = random.randint(1, 5) * (workers if loops > 1 else 1)
    placement = looped(loops * workers, workers)
    recomputed = tuple(random.randint(0, m) for _ in placement)
    transfers = [(random.choice([0.0, 1.0, 7.0]), random.choice([0.0, 3.0])) for _ in placement]
    costs = drawn(random, m, recomputed, transfers)

    waves = waves_of(order, m, placement, recomputed, from_host=True)

    schedule = order.build(m, placement, recomputed)
    by_moves = with_weights_from_the_host(replace(schedule, caller=()), costs)
    assert waves.makespan(costs) == by_moves


def hosted(stages: int, workers: int, m: int, transfer: float) -> float:
    """How long fill-drain takes, of which all is recomputed, if a weight is so long on its way."""
    recomputed = (m,) * stages
    costs = ActionCosts(
        {1: [MicroBatchCost(1.0, 1.0, 2.0, 1.0)] * stages},
        [1] * m,
        recomputed,
        [Place()] * stages,
        transfers=[(transfer, transfer)] * stages,
    )
    waves = waves_of(FILL_DRAIN, m, looped(stages, workers), recomputed, from_host=True)
    return waves.makespan(costs)


def test_waits_for_weights_of_one_device_by_hand() -> None:
    # What is computed hides all transfers but the first weights and the last gradients.
    assert hosted(3, 1, 1, 0.5) == 0.5 + 12 + 0.5
    # The weights of three stages come, the last stage computes, and the gradients of three go.
    assert hosted(3, 1, 1, 10.0) == 3 * 10 + 4 + 3 * 10
