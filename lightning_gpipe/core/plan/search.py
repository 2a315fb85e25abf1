"""Finds the fastest of the candidates that fit the memory of the devices.

Only few are balanced. Each candidate first has a bound, below which its time cannot be; when no
other one has a lower bound, it is balanced and its time predicted. The first whose predicted time
comes up is the fastest, as in A* search.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import count

from lightning_gpipe.core.plan.balance.by_profile import memory_costs, time_costs
from lightning_gpipe.core.plan.balance.costs import LayerCosts, Place
from lightning_gpipe.core.plan.balance.solver import NothingFits, solve_on
from lightning_gpipe.core.plan.candidates import Asked, Candidate
from lightning_gpipe.core.plan.measured import ModelProfile
from lightning_gpipe.core.plan.prediction import (
    Prediction,
    Settings,
    StageCost,
    costs_of,
    sizes_of,
)

_TRIES = 2  # balances of a candidate: what enters a stage is known when there is one


class Search:
    """Balances, bounds and predicts candidates, each of them once.

    Args:
        asked: What is given of the plan.
    """

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._balanced: dict[Candidate, Prediction] = {}
        self._wholes: dict[int, StageCost] = {}

    def fastest(self, candidates: Iterable[Candidate]) -> Candidate | None:
        """The candidate with the least time of those that fit; None if none does."""
        order = count()
        heap = [
            (self._least(each), next(order), False, each)
            for each in candidates
            if self._excess(each) <= 0
        ]
        heapify(heap)
        while heap:
            _, _, predicted, candidate = heappop(heap)
            if predicted:
                return candidate
            found = self.predicted(candidate)
            if not any(found.missing):
                heappush(heap, (found.time, next(order), True, candidate))
        return None

    def nearest(self, candidates: Sequence[Candidate]) -> Prediction:
        """Of candidates of which none fits, the one that lacks least where it lacks most.

        Of those that lack memory whatever the balance, only one is balanced.
        """
        excess = {each: self._excess(each) for each in candidates}
        least = min(excess, key=lambda each: excess[each])
        hopeful = [each for each in candidates if excess[each] <= 0 or each == least]
        return min(map(self.predicted, hopeful), key=lambda found: max(found.missing))

    def predicted(self, candidate: Candidate) -> Prediction:
        """What a candidate takes, balanced as well as can be."""
        if candidate not in self._balanced:
            self._balanced[candidate] = self._best_balanced(candidate)
        return self._balanced[candidate]

    def _best_balanced(self, candidate: Candidate) -> Prediction:
        """Balance a candidate, inputs from other stages included: they follow from a balance."""
        devices, places = self._devices(candidate.stages)
        profile = self._profile(candidate.chunks)
        if self._asked.balance is not None:
            return self._with(candidate, self._asked.balance, devices, places)
        costs = _costs(profile, candidate, max(sizes_of(self._asked.rows, candidate.chunks)))
        found, boundaries = None, 0.0
        for _ in range(_TRIES):
            taken = [replace(each, taken=each.taken + boundaries) for each in places]
            try:
                balance = solve_on(costs, self._with_around(profile, taken))
            except NothingFits as error:
                balance = error.balance
            again = self._with(candidate, tuple(balance), devices, places)
            if found is None or max(again.missing) < max(found.missing):
                found = again
            if not max(again.missing):
                break
            boundaries = max(stage.memory.boundaries for stage in again.stages)
        assert found is not None, "the loop has run"
        return found

    def _with(
        self,
        candidate: Candidate,
        balance: tuple[int, ...],
        devices: Sequence[int],
        places: Sequence[Place],
    ) -> Prediction:
        _, m, k = candidate
        settings = Settings(balance, m, (k,) * len(balance))
        sizes = sizes_of(self._asked.rows, m)
        profile = self._profile(m)
        return Prediction(
            settings, profile, tuple(places), sizes, self._asked.around, tuple(devices)
        )

    def _with_around(self, profile: ModelProfile, places: Sequence[Place]) -> list[Place]:
        """The places, with what is around the layers on one of them."""
        outside = len(places) - 1 if self._asked.around == "last" else 0
        held = profile.around.held_bytes
        return [
            replace(place, taken=place.taken + held) if j == outside else place
            for j, place in enumerate(places)
        ]

    def _devices(self, n: int) -> tuple[list[int], list[Place]]:
        """The ``n`` best devices, in order: the fastest, and of these the largest."""
        best = sorted(
            range(len(self._asked.places)),
            key=lambda d: (-self._asked.places[d].speed, -self._asked.places[d].memory, d),
        )[:n]
        return sorted(best), [self._asked.places[d] for d in sorted(best)]

    def _profile(self, m: int) -> ModelProfile:
        """The one that was measured with the nearest number of rows."""
        rows = max(sizes_of(self._asked.rows, m))
        return min(self._asked.profiles, key=lambda each: max(each.rows / rows, rows / each.rows))

    def _least(self, candidate: Candidate) -> float:
        """A time below which no balance of a candidate comes.

        A micro-batch passes all stages, on the fastest device at best; the others follow through
        the slowest stage, which has its share of the layers at least.
        """
        n, m, k = candidate
        _, places = self._devices(n)
        speeds = [place.speed for place in places]
        through, share = 1 / max(speeds), 1 / sum(speeds)
        whole = self._whole(m)
        # Of forwards that drop and those that keep, the faster: a bound need not tell them apart.
        passing = min(whole.forward, whole.dropping)
        forward = passing * (through + (m - 1) * share)
        again = (m * whole.backward + k * whole.forward) * share
        last = whole.backward * (through + (m - 1) * share)
        return forward + max(again, last)

    def _excess(self, candidate: Candidate) -> float:
        """The bytes that all devices together lack, whatever the balance."""
        n, m, k = candidate
        _, places = self._devices(n)
        alive = max(m - k, min(1, k))
        return self._held + alive * self._whole(m).saved - sum(place.memory for place in places)

    @cached_property
    def _held(self) -> int:
        """The bytes of all layers, and of what is around them, whatever runs."""
        profile = self._asked.profiles[0]
        return sum(layer.held_bytes for layer in (*profile.layers, profile.around))

    def _whole(self, m: int) -> StageCost:
        """What one of ``m`` micro-batches costs in all layers, at least."""
        if m not in self._wholes:
            rows = self._asked.rows // m
            (self._wholes[m],) = costs_of(self._profile(m), [self._asked.layers], rows)
        return self._wholes[m]


def _costs(profile: ModelProfile, candidate: Candidate, rows: int) -> LayerCosts:
    """What the solver goes by, for micro-batches with so many rows."""
    _, m, k = candidate
    asked = replace(profile, chunks=m, rows=rows)
    return LayerCosts(time_costs(asked, k).times, memory_costs(asked, k).times)
