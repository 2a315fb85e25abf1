"""Another balance, by what the stages were measured to take while they ran.

Layers are measured one by one, once; a stage is measured whenever it runs. If a stage takes longer
than its layers were measured to, its device is taken to be that much slower, as one that is hot, or
that another user needs too. So each device has a speed, and the exact solver finds a balance for
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from lightning_gpipe.core.plan.balance.costs import LayerCosts, Place
from lightning_gpipe.core.plan.balance.solver import solve_on


@dataclass(frozen=True)
class Shift:
    """Another balance, and what it would bring.

    Attributes:
        before: The number of layers in each stage now.
        after: The same after it.
        measured: The time of the slowest stage now.
        stages: The time of each stage after it.
    """

    before: tuple[int, ...]
    after: tuple[int, ...]
    measured: float
    stages: tuple[float, ...]

    @property
    def predicted(self) -> float:
        """The time of the slowest stage after it."""
        return max(self.stages)

    @property
    def gain(self) -> float:
        """By what share the slowest stage gets faster; 0.0 if it does not."""
        return max(0.0, 1 - self.predicted / self.measured)

    @property
    def moved(self) -> int:
        """How many layers come to another stage."""
        stages = [_stage_of_each(balance) for balance in (self.before, self.after)]
        return sum(one != other for one, other in zip(*stages, strict=True))


def shift_for(
    costs: LayerCosts,
    balance: Sequence[int],
    busy: Sequence[float],
    placement: Sequence[int],
    places: Sequence[Place],
) -> Shift:
    """The best balance by measured times of the stages.

    Args:
        costs: What the layers cost, by a measurement of each; any unit of time.
        balance: The number of layers in each stage.
        busy: The time in which each stage was at work, in a mini-batch.
        placement: The worker of each stage.
        places: What each stage runs on; the speeds are found here.

    Raises:
        ValueError: If no balance fits the memory of the places.
    """
    speeds = speeds_of(_sums(costs.times, balance), busy, placement)
    found = [replace(place, speed=speeds[w]) for place, w in zip(places, placement, strict=True)]
    after = solve_on(costs, found)
    predicted = [
        cost / speeds[w] for cost, w in zip(_sums(costs.times, after), placement, strict=True)
    ]
    return Shift(tuple(balance), tuple(after), max(busy), tuple(predicted))


def speeds_of(
    costs: Sequence[float], busy: Sequence[float], placement: Sequence[int]
) -> list[float]:
    """How much of the layers' costs each worker runs in a unit of time.

    Args:
        costs: What the layers of each stage cost.
        busy: The time in which each stage was at work.
        placement: The worker of each stage.

    Returns:
        The speed of each worker; that of one whose layers cost nothing is the mean.
    """
    workers = max(placement) + 1
    cost, time = [0.0] * workers, [0.0] * workers
    for j, worker in enumerate(placement):
        cost[worker] += costs[j]
        time[worker] += busy[j]
    mean = sum(cost) / sum(time) if sum(cost) and sum(time) else 1.0
    return [c / t if c and t else mean for c, t in zip(cost, time, strict=True)]


def _sums(costs: Sequence[float], balance: Sequence[int]) -> list[float]:
    return [
        sum(costs[end - size : end]) for end, size in zip(accumulate(balance), balance, strict=True)
    ]


def _stage_of_each(balance: Sequence[int]) -> list[int]:
    return [j for j, size in enumerate(balance) for _ in range(size)]
