"""Simulation: by how much a schedule found by search is faster than the best one with a name.

Each table of costs is drawn: stages differ by up to a fifth in time and in bytes, B takes 0.8 to
1.4 times as long as F, W 0.6 to 1.1 times, a whole backward a tenth less than both, and 0.3 to 0.7
of the activations stay from B to W. The devices have equal memory, drawn between that of the
schedule with a name that needs least and that of the one that needs most. Of those that fit, with
whole and with split backwards, the fastest is compared with the schedule that the search finds for
the same memory. Nothing runs: both times are those of the simulator.

    python -m benchmarks.schedule_search

It is never slower, as the schedules with names compete in the search.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import accumulate
from random import Random
from statistics import median
from typing import NamedTuple, get_args

from benchmarks.harness import Report, options
from lightning_gpipe.core.planner.schedule_search import fastest_schedule
from lightning_gpipe.core.planner.stage_cost import MicroBatchCost
from lightning_gpipe.core.schedules import (
    Action,
    ByMicroBatch,
    Kind,
    Row,
    Schedule,
    ScheduleKind,
    folded,
    looped,
)

KINDS = (Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHTS)
Costs = dict[bool, list[MicroBatchCost]]
PLACEMENTS = {
    "4 devices, a stage on each, m = 16": (looped(4, 4), 16),
    "4 devices, two stages on each, m = 16": (folded(8, 4), 16),
    "8 devices, a stage on each, m = 32": (looped(8, 8), 32),
    "8 devices, two stages on each, m = 32": (folded(16, 8), 32),
}


class Comparison(NamedTuple):
    """The times of the best schedule with a name and of what is found, and how long that took."""

    named: float
    best: float
    seconds: float

    @property
    def gain(self) -> float:
        """The share by which the time of a mini-batch is shorter."""
        return 1 - self.best / self.named


def main(argv: list[str] | None = None) -> None:
    """Draw, search and print."""
    given = options("schedule_search", __doc__, rounds=1, argv=argv, tables=50, tries=20_000)
    report = Report(
        given,
        f"Simulated: a schedule found by search beside the best with a name, {given.tables} tables",
        columns=("", "shorter by, median", "at most", "shorter in", "seconds"),
    )
    for name, (placement, m) in PLACEMENTS.items():
        found = [compare(Random(k), m, placement, given.tries) for k in range(given.tables)]
        gains = [each.gain for each in found]
        report.rows.append(
            (
                name,
                f"{100 * median(gains):.1f} %",
                f"{100 * max(gains):.1f} %",
                f"{sum(gain > 1e-8 for gain in gains)} of {len(gains)}",
                f"{median(each.seconds for each in found):.1f}",
            )
        )
        slowest = round(max(each.best / each.named for each in found), 8)
        report.target(f"{name}: time found / best with a name, the worst", slowest, at_most=1.0)
    report.publish()


def drawn_costs(random: Random, n: int) -> Costs:
    """The costs of ``n`` stages, with whole and with split backwards."""
    backward, weights = random.uniform(0.8, 1.4), random.uniform(0.6, 1.1)
    left = random.uniform(0.3, 0.7)
    whole, split = [], []
    for _ in range(n):
        f, b, w = (each * random.uniform(0.8, 1.2) for each in (1.0, backward, weights))
        saved = random.uniform(0.8, 1.2)
        whole.append(MicroBatchCost(f, f, 0.9 * (b + w), saved))
        split.append(MicroBatchCost(f, f, b, saved, weights=w, left=left * saved))
    return {False: whole, True: split}


def schedules_with_names(
    m: int, placement: tuple[int, ...], costs: Costs
) -> list[tuple[float, float]]:
    """The time of each, and the bytes of the device that holds most."""
    kinds = [
        ScheduleKind.of(name, split=split) for name in get_args(ByMicroBatch) for split in costs
    ]
    return [
        judged(kind.build(m, placement), costs[kind.split])
        for kind in kinds
        if kind.possible(m, placement)
    ]


def judged(schedule: Schedule, costs: Sequence[MicroBatchCost]) -> tuple[float, float]:
    """The time of a schedule, and the bytes of the device that holds most."""

    def duration(action: Action) -> float:
        if action.by_caller:
            return 0.0
        cost = costs[action.j]
        return (cost.forward, cost.backward, cost.weights)[KINDS.index(action.kind)]

    def held(row: Row) -> Iterator[float]:
        for kind, _, j in row:
            cost = costs[j]
            changes = cost.saved, cost.left - cost.saved, -cost.left
            yield changes[KINDS.index(kind)]

    most = max(max(accumulate(held(row))) for row in schedule.rows)
    return schedule.simulate(duration).makespan, most


def compare(random: Random, m: int, placement: tuple[int, ...], tries: int) -> Comparison:
    """Draw costs and a memory, and search for them."""
    costs, workers = drawn_costs(random, len(placement)), 1 + max(placement)
    named = schedules_with_names(m, placement, costs)
    needed = [most for _, most in named]
    room = random.uniform(min(needed), max(needed))
    began = time.perf_counter()
    best = fastest_schedule(m, placement, costs, [room] * workers, tries=tries)
    seconds = time.perf_counter() - began
    assert best is not None, "a schedule with a name fits"
    found, most = judged(best.kind.build(m, placement), costs[best.kind.split])
    assert most <= room, "what is found fits"
    return Comparison(min(time for time, most in named if most <= room), found, seconds)


if __name__ == "__main__":
    main()
