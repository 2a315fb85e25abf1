"""Lower bounds of the time and the memory of candidates, whatever their balance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from lightning_gpipe.core.balance import ModelProfile, Place
from lightning_gpipe.core.planner.predicted_stage import HeldShares, Memory
from lightning_gpipe.core.planner.settings import PlannedSettings
from lightning_gpipe.core.planner.stage_cost import MicroBatchCost, costs_of, sizes_of
from lightning_gpipe.core.schedules import held_at_once


@dataclass(frozen=True)
class LowerBounds:
    """Lower bounds for the candidates of a search, by its profiles and devices."""

    profiles: Sequence[ModelProfile]
    places: Sequence[Place]
    rows: int
    replicas: int

    def devices(self, candidate: PlannedSettings) -> list[int]:
        """The device of each stage, of the best: the fastest, and of these the largest."""
        places = self.places
        placement = candidate.order.placement(candidate.stages, len(places))
        order = sorted(range(len(places)), key=lambda d: (-places[d].speed, -places[d].memory, d))
        best = sorted(order[: 1 + max(placement)])
        return [best[worker] for worker in placement]

    def profile(self, m: int) -> ModelProfile:
        rows = max(sizes_of(self.rows, m))
        return min(self.profiles, key=lambda p: max(p.rows / rows, rows / p.rows))

    def time(self, candidate: PlannedSettings) -> float:
        """A lower bound of a candidate's time, whatever the balance.

        The devices together compute all micro-batches. With a stage for each device, a micro-batch
        passes all stages and comes back, on the fastest device at best, and the others follow back
        through the slowest stage, which has at least its share of the layers.
        """
        n, m, order = candidate.stages, candidate.chunks, candidate.order
        devices = {*self.devices(candidate)}
        speeds = [self.places[d].speed for d in devices]
        whole, share = self._whole(m, order.split), 1 / sum(speeds)
        # Of forwards that drop and those that keep, the faster: a bound need not tell them apart.
        forward = min(whole.forward, whole.dropping)
        busy = m * (forward + whole.backward + whole.weights) * share
        through = (forward + whole.backward) / max(speeds)
        following = (m - 1) * whole.backward * share if len(devices) == n else 0.0
        return max(through + following, busy)

    def excess(self, candidate: PlannedSettings) -> float:
        """The bytes that all devices together lack, whatever the balance."""
        memory = sum(self.places[d].memory for d in {*self.devices(candidate)})
        saved = 0 if candidate.offload else self._whole(candidate.chunks, False).saved
        of_stages = HeldShares.of_stages(candidate, self.replicas)
        around = HeldShares.around_stages(candidate, self.replicas)
        stages, others = self._memory
        held = stages.divided(of_stages).held + others.divided(around).held
        return held + _least_alive(candidate) * saved - memory

    @cached_property
    def _memory(self) -> tuple[Memory, Memory]:
        """The memory of all layers, and of the modules around them."""
        profile = self.profiles[0]
        return Memory.of(profile.layers), Memory.of([profile.around])

    @cached_property
    def _whole(self) -> Callable[[int, bool], MicroBatchCost]:
        return cache(self._least_cost)

    def _least_cost(self, m: int, split: bool) -> MicroBatchCost:
        profile, rows = self.profile(m), self.rows // m
        (whole,) = costs_of(profile, [len(profile.layers)], rows)
        if not split:
            return whole
        # On some stages only; a whole backward counts where it is faster.
        inputs = sum(each.inputs.at(rows) for each in profile.layers if each.inputs)
        weights = sum(each.weights.at(rows) for each in profile.layers if each.weights)
        backward = min(inputs, whole.backward)
        both = min(inputs + weights, whole.backward)
        return whole._replace(backward=backward, weights=both - backward)


def _least_alive(candidate: PlannedSettings) -> int:
    m, numbers = candidate.chunks, candidate.recomputed
    if not numbers or candidate.order.by_micro_batch:
        return 1
    return min(held_at_once(m, k) for k in numbers)
