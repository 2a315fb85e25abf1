"""The costs of measured layers for the solver, and the balance that later times ask for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from lightning_gpipe.core.balance.costs import LayerCosts, Place, Transfer
from lightning_gpipe.core.balance.profiles import ModelProfile
from lightning_gpipe.core.balance.solver import solve_on
from lightning_gpipe.core.layout import Around, layer_ranges, outside_stage
from lightning_gpipe.core.schedules import (
    ActivationCheckpointing,
    check_activation_checkpointing,
    held_at_once,
    recomputed_by_stage,
)


@dataclass(frozen=True)
class StageCosts:
    """The time of a stage for a mini-batch, recomputation included, and its bytes at the peak."""

    time: float
    memory: float
    unit: Literal["s", "FLOP"]


def stage_costs(
    profile: ModelProfile, balance: Sequence[int], mode: ActivationCheckpointing, around: Around
) -> list[StageCosts]:
    """Return the costs of each stage, one of which has the modules around the layers."""
    outside = outside_stage(around, len(balance))
    places = recomputing([Place()] * len(balance), profile, mode)
    times, costs = time_costs(profile).of_stages(balance, places), []
    for j, (place, own) in enumerate(zip(places, layer_ranges(balance), strict=True)):
        memory = memory_costs(profile, place.alive)
        size = sum(memory.times_at(replace(place, extra=place.alive))[own.start : own.stop])
        size += sum(t.time for t in memory.transfers if t.user in own and t.maker not in own)
        size += profile.around.held_bytes if j == outside else 0
        costs.append(StageCosts(profile.chunks * times[j], size, profile.unit))
    return costs


def recomputing(
    places: Sequence[Place], profile: ModelProfile, mode: ActivationCheckpointing
) -> list[Place]:
    """Return the places with what their stages recompute, of which one micro-batch is alive."""
    m = profile.chunks
    check_activation_checkpointing(mode, len(places))
    numbers = recomputed_by_stage(mode, m, len(places))
    return [
        replace(place, alive=held_at_once(m, k), extra=k / m)
        for place, k in zip(places, numbers, strict=True)
    ]


def time_costs(profile: ModelProfile, *, split: bool = False) -> LayerCosts:
    """Return the times of the layers for a micro-batch, with the bytes that they need.

    A recomputation is extra. The modules around the layers do not count: all stages wait for them.
    """
    return LayerCosts(
        profile.times(split=split),
        [layer.held_bytes for layer in profile.layers],
        live=[layer.saved.at(profile.rows) for layer in profile.layers],
        extra=[layer.dropping.at(profile.rows) for layer in profile.layers],
    )


def memory_costs(profile: ModelProfile, alive: float) -> LayerCosts:
    """Return the bytes of the layers at the peak of a mini-batch, in the place of times.

    At the end of forward each layer holds its static bytes, and what it has saved for micro-batches
    that are not recomputed, and one other. A stage keeps its inputs for all micro-batches; where a
    layer saves them, they count once, for the number ``alive``.
    """
    held = [layer.held_bytes for layer in profile.layers]
    saved = [layer.saved.at(profile.rows) for layer in profile.layers]
    carried = [
        Transfer(value.maker, value.user, max(0.0, kept))
        for value in profile.carried
        if (
            kept := profile.chunks * value.size.at(profile.rows)
            - alive * value.saved.at(profile.rows)
        )
    ]
    return LayerCosts(held, held, carried, saved, saved)


@dataclass(frozen=True)
class Shift:
    """A change of the balance, and its gain."""

    before: tuple[int, ...]  # the number of layers in each stage
    after: tuple[int, ...]
    measured: float  # the time of the slowest stage before the change
    stages: tuple[float, ...]  # the predicted time of each stage after it

    @property
    def predicted(self) -> float:
        return max(self.stages)

    @property
    def gain(self) -> float:
        """The share by which the slowest stage gets faster; 0.0 if it does not."""
        return max(0.0, 1 - self.predicted / self.measured)

    @property
    def moved(self) -> int:
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
    """Return the best balance if stages were ``busy`` for these times of a mini-batch.

    The speeds of ``places`` are replaced.
    """
    speeds = _speeds(costs.of_stages(balance, places), busy, placement)
    pairs = zip(places, placement, strict=True)
    after = solve_on(costs, [replace(place, speed=speeds[w]) for place, w in pairs])
    sums = zip(costs.of_stages(after, places), placement, strict=True)
    predicted = tuple(cost / speeds[w] for cost, w in sums)
    return Shift(tuple(balance), tuple(after), max(busy), predicted)


def _speeds(costs: Sequence[float], busy: Sequence[float], placement: Sequence[int]) -> list[float]:
    """Return the cost that each worker runs in a unit of time; the mean if layers cost nothing."""
    workers = max(placement) + 1
    cost, time = [0.0] * workers, [0.0] * workers
    for j, worker in enumerate(placement):
        cost[worker] += costs[j]
        time[worker] += busy[j]
    mean = sum(cost) / sum(time) if sum(cost) and sum(time) else 1.0
    return [c / t if c and t else mean for c, t in zip(cost, time, strict=True)]
