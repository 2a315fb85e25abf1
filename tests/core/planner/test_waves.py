"""Times of whole micro-batches, compared with the simulation of the schedule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from random import Random

import numpy as np
import pytest

from lightning_gpipe.core.planner.waves import Durations, Wave, waves
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


def drawn(random: Random, m: int, n: int, recomputed: int, *, split: bool) -> list[Durations]:
    """Micro-batches of a few sizes, some of whose costs are 0."""
    kinds = [
        [np.array([float(random.choice([0, 1, 2, 5, 9])) for _ in range(n)]) for _ in range(4)]
        for _ in range(3)
    ]
    return [
        {Kind.FORWARD: forward, Kind.BACKWARD: backward}
        | ({Kind.RECOMPUTE: again} if i < recomputed else {})
        | ({Kind.WEIGHTS: weights} if split else {})
        for i in range(m)
        for forward, again, backward, weights in [random.choice(kinds)]
    ]


def by_simulation(times: Sequence[Durations], schedule: Schedule) -> dict[Action, Span]:
    """What the simulator says: a phase starts when the one before has ended."""

    def cost(action: Action) -> float:
        of_kind = times[action.i].get(action.kind)
        if action.j < 0 or of_kind is None:  # the caller's
            return 0.0
        return float(of_kind[action.j])

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


def in_fill_drain(times: Sequence[Durations]) -> Iterator[Wave]:
    patterns = FILL_DRAIN.patterns(len(times), one_each(len(times[0][Kind.FORWARD])))
    return waves(patterns, times, one_loss=True)


@pytest.mark.parametrize("seed", range(100))
def test_every_action_of_a_drawn_case_has_the_times_of_the_simulation(seed: int) -> None:
    random = Random(seed)
    m, n, split = random.randint(1, 7), random.randint(1, 6), random.random() < 0.5
    recomputed = random.randint(0, m)
    times = drawn(random, m, n, recomputed, split=split)
    schedule = ScheduleKind(split=split).build(m, one_each(n), recomputed)

    assert by_waves(in_fill_drain(times)) == by_simulation(times, schedule)


@pytest.mark.parametrize("order", KINDS, ids=str)
@pytest.mark.parametrize("seed", range(25))
def test_times_of_any_schedule_are_those_of_the_simulation(order: ScheduleKind, seed: int) -> None:
    random = Random(seed)
    workers = random.randint(1, 5)
    loops = 1 if order.schedule == "zero_bubble" else random.randint(1, 3)
    m = random.randint(1, 7) * (workers if loops > 1 else 1)
    placement, recomputed = looped(loops * workers, workers), random.randint(0, m)
    times = drawn(random, m, len(placement), recomputed, split=order.split)

    schedule = order.build(m, placement, recomputed)
    patterns = order.patterns(m, placement)
    found = waves(patterns, times, one_loss=not order.by_micro_batch)

    assert by_waves(found) == by_simulation(times, schedule)


def test_actions_of_each_worker_come_in_its_order() -> None:
    times = drawn(Random(0), 6, 6, 2, split=True)
    order = ScheduleKind("1f1b", split=True)
    schedule = order.build(6, looped(6, 3), 2)

    patterns = order.patterns(6, schedule.placement)
    found = by_waves(waves(patterns, times, one_loss=False))

    for worker, row in enumerate(schedule.rows):
        assert [a for a in found if schedule.worker_of(a) == worker] == list(row)


def test_workers_that_wait_for_one_another() -> None:
    times = drawn(Random(0), 1, 2, 0, split=False)
    nobody_first = [Pattern([(0, j)], [(0, j)], 0) for j in (1, 1)]

    with pytest.raises(RuntimeError, match="wait for one another"):
        list(waves(nobody_first, times, one_loss=False))


def test_equal_micro_batches_take_the_slowest_stage_once_for_each_but_the_first() -> None:
    forward, backward = np.array([1.0, 5.0, 2.0]), np.array([2.0, 7.0, 3.0])

    *_, last = in_fill_drain([{Kind.FORWARD: forward, Kind.BACKWARD: backward}] * 10)

    assert last.end.max() == (1 + 5 + 2) + 9 * 5 + (2 + 7 + 3) + 9 * 7


def test_no_action_of_a_stage_starts_before_the_one_before_has_ended() -> None:
    """Also by a rounding error: memory over time is counted in this order."""
    random = np.random.default_rng(0)
    kinds = Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD
    times = [dict(zip(kinds, random.random((3, 8)), strict=True)) for _ in range(50)]
    free = np.zeros(8)
    for wave in in_fill_drain(times):
        assert (wave.start >= free[wave.j]).all()
        free[wave.j] = wave.end
