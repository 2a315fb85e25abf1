"""Lower bounds of the time and the memory of candidates, whatever their balance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from lightning_gpipe.core.balance import ModelProfile, Place
from lightning_gpipe.core.planner.settings import PlannedSettings
from lightning_gpipe.core.planner.stage_cost import MicroBatchCost, costs_of, sizes_of


@dataclass(frozen=True)
class LowerBounds:
    """The bounds of the candidates of a search, and what of its devices and profiles they take.

    Attributes:
        profiles: The costs of the layers, measured with micro-batches of different sizes.
        places: The devices.
        rows: The number of rows of a mini-batch.
    """

    profiles: Sequence[ModelProfile]
    places: Sequence[Place]
    rows: int

    def devices(self, candidate: PlannedSettings) -> list[int]:
        """The device of each stage, of the best: the fastest, and of these the largest."""
        places = self.places
        placement = candidate.order.placement(candidate.stages, len(places))
        order = sorted(range(len(places)), key=lambda d: (-places[d].speed, -places[d].memory, d))
        best = sorted(order[: 1 + max(placement)])
        return [best[worker] for worker in placement]

    def profile(self, m: int) -> ModelProfile:
        """The profile that was measured with the nearest number of rows."""
        rows = max(sizes_of(self.rows, m))
        return min(self.profiles, key=lambda p: max(p.rows / rows, rows / p.rows))

    def time(self, candidate: PlannedSettings) -> float:
        """A lower bound of a candidate's time, whatever the balance.

        A micro-batch passes all stages, on the fastest device at best; the others follow through
        the slowest stage, which has at least its share of the layers. Until the first backward is
        back there, it has run at most as many forwards as there are stages, unless the schedule
        runs all of them before.
        """
        n, m, order = candidate.stages, candidate.chunks, candidate.order
        devices = {*self.devices(candidate)}
        speeds = [self.places[d].speed for d in devices]
        through, share = 1 / max(speeds), 1 / sum(speeds)
        whole = self._whole(m, order.split)
        # Of forwards that drop and those that keep, the faster: a bound need not tell them apart.
        forward = min(whole.forward, whole.dropping)
        both = whole.backward + whole.weights
        if not order.by_micro_batch:
            again = (m * both + self._again(candidate)) * share
            last = whole.backward * through + (m - 1) * both * share
            return forward * (through + (m - 1) * share) + max(again, last)
        busy = (m * (forward + both) + self._again(candidate)) * share
        if len(devices) < n:
            return max((forward + whole.backward) * through, busy)
        late = n if order.definition.defers_weights else 1
        after = max(0, m - n) * forward + (m - 1) * whole.backward
        after += max(0, m - late) * whole.weights
        return max((forward + whole.backward) * through + after * share, busy)

    def _again(self, candidate: PlannedSettings) -> float:
        """The least time of recomputations, whatever the balance, on a device of speed 1.

        With fill-drain, what all devices together have no room for must be recomputed: of the
        layers whose forward takes the least time for the bytes that it saves.
        """
        m, numbers = candidate.chunks, candidate.recomputed
        if numbers:
            return min(numbers) * self._whole(m, candidate.order.split).forward
        if candidate.order.by_micro_batch or candidate.offload:
            return 0.0
        rows, time = self.rows // m, 0.0
        layers = [(x.saved.at(rows), x.forward.at(rows)) for x in self.profile(m).layers]
        over = self.excess(candidate) + (m - 1) * sum(saved for saved, _ in layers)
        for saved, forward in sorted((x for x in layers if x[0]), key=lambda x: x[1] / x[0]):
            number = min(max(0.0, over / saved), m - 1)
            over -= number * saved
            time += number * forward
        return time

    def excess(self, candidate: PlannedSettings) -> float:
        """The bytes that all devices together lack, whatever the balance."""
        memory = sum(self.places[d].memory for d in {*self.devices(candidate)})
        saved = 0 if candidate.offload else self._whole(candidate.chunks, False).saved
        profile = self.profiles[0]
        held = profile.around.held_bytes + sum(layer.buffer_bytes for layer in profile.layers)
        if candidate.weights == "device":
            held = sum(layer.held_bytes for layer in (*profile.layers, profile.around))
        return held + _least_alive(candidate) * saved - memory

    @cached_property
    def _whole(self) -> Callable[[int, bool], MicroBatchCost]:
        return cache(self._least_cost)

    def _least_cost(self, m: int, split: bool) -> MicroBatchCost:
        """The least cost of one of ``m`` micro-batches in all layers."""
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
    """The least number of micro-batches that are alive on each stage."""
    m, numbers = candidate.chunks, candidate.recomputed
    if not numbers or candidate.order.by_micro_batch:
        return 1
    return min(max(m - k, min(1, k)) for k in numbers)
