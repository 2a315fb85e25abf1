"""The fastest schedule for costs and memory: beside those with names, on drawn costs.

Here are also the tests of ``block_search``.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from lightning_gpipe.core.planner.block_search import BlockSearch
from lightning_gpipe.core.planner.schedule_search import FittingSchedule, fastest_schedule
from lightning_gpipe.core.planner.stage_cost import MicroBatchCost
from lightning_gpipe.core.schedules import (
    SCHEDULES,
    Action,
    Kind,
    Schedule,
    ScheduleKind,
    folded,
    looped,
)
from tests.core.schedules.test_table import drawn
from tests.support.blocks import drawn_block
from tests.support.placements import one_each

Costs = dict[bool, list[MicroBatchCost]]


def drawn_costs(random: Random, n: int) -> Costs:
    """Costs of stages that differ in all, in whole numbers of bytes."""
    whole, split = [], []
    for _ in range(n):
        forward, backward, weights = (random.uniform(0.5, 2.0) for _ in range(3))
        saved, entering = random.randint(20, 60), random.randint(0, 9)
        both = (backward + weights) * random.uniform(0.85, 1.0)
        whole.append(MicroBatchCost(forward, forward, both, saved, entering))
        left = random.randint(0, saved)
        split.append(
            MicroBatchCost(forward, forward, backward, saved, entering, weights=weights, left=left)
        )
    return {False: whole, True: split}


def time_of(schedule: Schedule, costs: Sequence[MicroBatchCost]) -> float:
    def time(action: Action) -> float:
        if action.by_caller:
            return 0.0
        cost = costs[action.j]
        return {
            Kind.FORWARD: cost.forward,
            Kind.BACKWARD: cost.backward,
            Kind.WEIGHTS: cost.weights,
        }[action.kind]

    return schedule.simulate(time).makespan


def peaks_of(schedule: Schedule, costs: Sequence[MicroBatchCost]) -> list[float]:
    """The most bytes of each worker, micro-batch by micro-batch."""
    peaks = []
    for row in schedule.rows:
        held: dict[tuple[int, int], float] = {}
        most = 0.0
        for kind, i, j in row:
            cost = costs[j]
            held[i, j] = {
                Kind.FORWARD: cost.saved + cost.entering,
                Kind.BACKWARD: cost.left,
                Kind.WEIGHTS: 0.0,
            }[kind]
            most = max(most, sum(held.values()))
        peaks.append(most)
    return peaks


def named(m: int, placement: tuple[int, ...], costs: Costs) -> list[FittingSchedule]:
    kinds = {ScheduleKind.of(name, split=split) for name in SCHEDULES for split in costs}  # type: ignore[arg-type]  # names
    found = []
    for kind in kinds:
        if kind.possible(m, placement):
            schedule, own = kind.build(m, placement), costs[kind.split]
            peaks = tuple(peaks_of(schedule, own))
            found.append(FittingSchedule(kind, time_of(schedule, own), peaks))
    return found


PLACEMENTS = [one_each(2), one_each(4), looped(4, 2), folded(4, 2), folded(6, 3)]


@pytest.mark.parametrize("seed", range(50))
def test_never_slower_than_a_schedule_with_a_name_that_fits(seed: int) -> None:
    """The memory is from too little for any of them to enough for all, fill-drain too."""
    random = Random(seed)
    placement = PLACEMENTS[seed % len(PLACEMENTS)]
    m, costs = random.randint(3, 12), drawn_costs(random, len(placement))
    others = named(m, placement, costs)
    tightest, loosest = (of(max(each.peaks) for each in others) for of in (min, max))
    memory = [random.uniform(0.9 * tightest, loosest)] * (1 + max(placement))

    best = fastest_schedule(m, placement, costs, memory, tries=600)

    fitting = [each.time for each in others if max(each.peaks) <= memory[0]]
    if best is None:
        assert not fitting
        return
    assert best.time <= min(fitting, default=best.time) * (1 + 1e-8)
    schedule = best.kind.build(m, placement)
    assert best.time == pytest.approx(time_of(schedule, costs[best.kind.split]), rel=1e-12)
    assert best.peaks == tuple(peaks_of(schedule, costs[best.kind.split]))
    assert max(best.peaks) <= memory[0]


EQUAL: Costs = {
    False: [MicroBatchCost(1, 1, 2, 1)] * 4,
    True: [MicroBatchCost(1, 1, 1, 1, weights=1, left=1)] * 4,
}


def test_simplest_of_those_that_are_as_fast() -> None:
    """On one device all are, and with the memory of 1F1B none is faster."""
    alone = fastest_schedule(3, (0,), {False: EQUAL[False][:1]}, [9.0])
    assert alone is not None
    assert alone.kind == ScheduleKind("1f1b")

    whole = fastest_schedule(8, one_each(4), {False: EQUAL[False]}, [4.0, 3.0, 2.0, 1.0])
    assert whole == (ScheduleKind("1f1b"), 33.0, (4.0, 3.0, 2.0, 1.0))


def test_zero_bubble_is_the_fastest_where_actions_take_equally_long() -> None:
    """Its first device never waits, and the last one only until the first micro-batch is there."""
    for room in (4.0, 7.0):
        best = fastest_schedule(8, one_each(4), {True: EQUAL[True]}, [room] * 4)

        assert best == (ScheduleKind("zero_bubble", True), 27.0, (4.0, 4.0, 4.0, 4.0))


def test_memory_that_schedules_with_names_have_no_use_for() -> None:
    """B takes twice as long as F and W; there is room for one more micro-batch than they hold."""
    costs = {True: [MicroBatchCost(1, 1, 2, 1, weights=1, left=1)] * 2}
    tight, loose = (fastest_schedule(4, one_each(2), costs, [room] * 2) for room in (2.0, 3.0))

    assert tight == (ScheduleKind("zero_bubble", True), 18.0, (2.0, 2.0))
    assert loose is not None
    assert loose[1:] == (17.0, (3.0, 3.0))
    assert str(loose.kind.build(4, one_each(2))) == drawn("""
        stage 0 | F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3 .
        stage 1 | .  F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3
        caller  | P0 P1 P2 L0 P3 L1 L2 L3 B0 B1 B2 B3
    """)


def test_nothing_fits() -> None:
    assert fastest_schedule(4, one_each(4), EQUAL, [0.5] * 4, tries=100) is None


def test_same_for_the_same_arguments() -> None:
    costs = drawn_costs(Random(5), 4)
    first, second = (
        fastest_schedule(6, folded(4, 2), costs, [1e3] * 2, tries=500) for _ in range(2)
    )

    assert first == second


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("split", [False, True])
def test_scores_are_those_of_the_schedule(placement: tuple[int, ...], split: bool) -> None:
    random = Random(0)
    for _ in range(10):
        costs = drawn_costs(random, len(placement))[split]
        block, m = drawn_block(placement, random, split=split), random.randint(1, 8)
        schedule = ScheduleKind(block, split).build(m, placement)
        peaks, workers = peaks_of(schedule, costs), 1 + max(placement)

        def score(
            room: float,
            m: int = m,
            workers: int = workers,
            costs: list[MicroBatchCost] = costs,
            block: tuple[tuple[int, ...], ...] = block,
        ) -> tuple[float, float]:
            search = BlockSearch(
                m,
                placement,
                [(each.forward, each.backward, each.weights) for each in costs],
                [
                    (each.saved + each.entering, each.left - each.saved - each.entering, -each.left)
                    for each in costs
                ],
                (room,) * workers,
                split,
            )
            return search.score(block)

        assert score(max(peaks)) == pytest.approx((0.0, time_of(schedule, costs)))
        assert score(max(peaks) - 1)[0] > 0
        assert score(0.0) == (sum(peaks), 0.0)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("split", [False, True])
def test_any_waits_are_a_block_and_any_block_has_waits(
    placement: tuple[int, ...], split: bool
) -> None:
    random = Random(0)
    search = BlockSearch(1, placement, (), (), (0.0,) * (1 + max(placement)), split)
    for _ in range(20):
        block = drawn_block(placement, random, split=split)
        assert search.block(search.waits(block)) == block
        waits = [random.randint(0, 9) for _ in search.waits(block)]
        ScheduleKind(search.block(waits), split).definition.check(1, placement)
