"""Another balance, by the times of the stages while they ran.

If a stage takes longer than the sum of its layers, its device counts as that much slower: it may be
hot, or shared with another user. So each device has a speed, for which the solver finds a balance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_gpipe.core.balance.costs import LayerCosts, Place
from lightning_gpipe.core.balance.solver import solve_on


@dataclass(frozen=True)
class Shift:
    """A change of the balance, and its gain.

    Attributes:
        before: The number of layers in each stage before it.
        after: The number of layers in each stage after it.
        measured: The time of the slowest stage before it.
        stages: The predicted time of each stage after it.
    """

    before: tuple[int, ...]
    after: tuple[int, ...]
    measured: float
    stages: tuple[float, ...]

    @property
    def predicted(self) -> float:
        """The predicted time of the slowest stage after it."""
        return max(self.stages)

    @property
    def gain(self) -> float:
        """The share by which the slowest stage gets faster; 0.0 if it does not."""
        return max(0.0, 1 - self.predicted / self.measured)

    @property
    def moved(self) -> int:
        """The number of layers that move to another stage."""
        before, after = (
            [j for j, size in enumerate(balance) for _ in range(size)]
            for balance in (self.before, self.after)
        )
        return sum(one != other for one, other in zip(before, after, strict=True))


def shift_for(
    costs: LayerCosts,
    balance: Sequence[int],
    busy: Sequence[float],
    placement: Sequence[int],
    places: Sequence[Place],
) -> Shift:
    """Return the best balance by measured times of the stages.

    Args:
        costs: The measured costs of the layers, in any unit of time.
        balance: The number of layers in each stage.
        busy: The time in which each stage was at work, in a mini-batch.
        placement: The worker of each stage.
        places: The device of each stage; their speeds are replaced.
    """
    speeds = _speeds(costs.of_stages(balance, places), busy, placement)
    pairs = zip(places, placement, strict=True)
    after = solve_on(costs, [replace(place, speed=speeds[w]) for place, w in pairs])
    sums = zip(costs.of_stages(after, places), placement, strict=True)
    predicted = tuple(cost / speeds[w] for cost, w in sums)
    return Shift(tuple(balance), tuple(after), max(busy), predicted)


def _speeds(costs: Sequence[float], busy: Sequence[float], placement: Sequence[int]) -> list[float]:
    """Return the speed of each worker: the cost that it runs in a unit of time.

    The speed of a worker whose layers cost nothing is the mean.
    """
    workers = max(placement) + 1
    cost, time = [0.0] * workers, [0.0] * workers
    for j, worker in enumerate(placement):
        cost[worker] += costs[j]
        time[worker] += busy[j]
    mean = sum(cost) / sum(time) if sum(cost) and sum(time) else 1.0
    return [c / t if c and t else mean for c, t in zip(cost, time, strict=True)]
