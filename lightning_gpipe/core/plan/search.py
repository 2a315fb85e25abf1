"""Finds the fastest of the candidates that fit the memory of the devices.

Only few are balanced. Candidates that differ in recomputation only are a group: the more is
recomputed, the less memory is needed and the longer it takes, so the first that fits is found by
bisection. Each group first has a bound, below which its time cannot be; when no other one has a
lower bound, its candidates are balanced and predicted. The first whose predicted time comes up is
the fastest, as in A* search.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from heapq import heapify, heappop, heappush
from math import ceil, log2

from lightning_gpipe.core.plan.balance.costs import LayerCosts, Place
from lightning_gpipe.core.plan.balance.solver import NothingFits, solve_on
from lightning_gpipe.core.plan.candidates import Asked, Candidate
from lightning_gpipe.core.plan.measured import ModelProfile
from lightning_gpipe.core.plan.orders import ORDERS
from lightning_gpipe.core.plan.prediction import Prediction
from lightning_gpipe.core.plan.settings import Settings
from lightning_gpipe.core.plan.stage_cost import StageCost, costs_of, sizes_of

_TRIES = 3  # balances of a candidate: what a stage has in memory is known when there is one
_ALIVE = 8  # numbers that the solver tells apart; each has tables of its own


class Search:
    """Balances, bounds and predicts candidates, each of them once.

    Args:
        asked: What is given of the plan.
    """

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._balanced: dict[Candidate, Prediction] = {}
        self._wholes: dict[tuple[int, bool], StageCost] = {}

    def fastest(self, candidates: Iterable[Candidate]) -> Candidate | None:
        """The candidate with the least time of those that fit; None if none does.

        Of those that differ in recomputation only, it is the one that recomputes least.
        """
        groups: dict[Hashable, list[Candidate]] = {}
        for each in sorted(candidates, key=lambda each: each.recomputed):
            if self._excess(each) <= 0:
                groups.setdefault((each.order, each.stages, each.chunks), []).append(each)
        simplest = sorted(groups.values(), key=lambda group: ORDERS.index(group[0].order))
        heap = [
            (self._least(group[0]), place, False, group[0]) for place, group in enumerate(simplest)
        ]
        heapify(heap)
        while heap:
            _, place, predicted, candidate = heappop(heap)
            if predicted:
                return candidate
            if (fitting := self._first_that_fits(simplest[place])) is not None:
                # Of those that are as fast, but for rounding, the first is the simplest.
                time = float(f"{self.predicted(fitting).time:.9g}")
                heappush(heap, (time, place, True, fitting))
        return None

    def _first_that_fits(self, candidates: Sequence[Candidate]) -> Candidate | None:
        """Of candidates of which each needs no more memory than the one before, by bisection."""
        if not any(self.predicted(candidates[0]).missing):
            return candidates[0]
        if any(self.predicted(candidates[-1]).missing):
            return None
        lacks, fits = 0, len(candidates) - 1
        while fits - lacks > 1:
            middle = (lacks + fits) // 2
            if any(self.predicted(candidates[middle]).missing):
                lacks = middle
            else:
                fits = middle
        return candidates[fits]

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
        """Balance a candidate, what each stage has in memory included: it follows from a balance.

        The first balance goes by what is known before: fill-drain keeps what is not recomputed. If
        it does not fit, what it was predicted to need tells how many micro-batches are alive on
        each stage, and the bytes of its inputs from others.
        """
        devices, places = self._devices(candidate.stages)
        if self._asked.balance is not None:
            return self._with(candidate, self._asked.balance, devices, places)
        costs = self._costs(candidate)
        places = self._with_outside(candidate, places)
        alive: Sequence[float] = [_least_alive(candidate)] * candidate.stages
        again = found = None
        boundaries = 0.0
        for _ in range(_TRIES):
            pairs = zip(places, alive, strict=True)
            taken = [replace(p, taken=p.taken + boundaries, alive=each) for p, each in pairs]
            try:
                balance = solve_on(costs, taken)
            except NothingFits as error:
                balance = error.balance
            if again is not None and again.settings.balance == tuple(balance):
                break
            again = self._with(candidate, tuple(balance), devices, places)
            if found is None or max(again.missing) < max(found.missing):
                found = again
            if not max(again.missing):
                break
            boundaries = max(stage.memory.boundaries for stage in again.stages)
            alive = _few(self._alive(candidate, again, alive))
        assert found is not None, "the loop has run"
        return found

    def _costs(self, candidate: Candidate) -> LayerCosts:
        """What the solver goes by."""
        _, m, k, order = candidate
        profile, rows = self._profile(m), max(sizes_of(self._asked.rows, m))
        asked = replace(profile, chunks=m, rows=rows)
        return LayerCosts(
            asked.times(recomputed=k / m, split=order.split),
            [layer.held_bytes for layer in profile.layers],
            live=[layer.saved.at(rows) for layer in profile.layers],
        )

    def _alive(
        self, candidate: Candidate, found: Prediction, before: Sequence[float]
    ) -> list[float]:
        """How many micro-batches each stage was predicted to hold at its peak."""
        rows, end, alive = max(found.rows), 0, []
        for stage, size, guess in zip(found.stages, found.settings.balance, before, strict=True):
            layers = self._profile(candidate.chunks).layers[end : end + size]
            end += size
            saved = sum(layer.saved.at(rows) for layer in layers)
            alive.append(stage.memory.activations / saved if saved else guess)
        return alive

    def _with(
        self,
        candidate: Candidate,
        balance: tuple[int, ...],
        devices: Sequence[int],
        places: Sequence[Place],
    ) -> Prediction:
        _, m, k, order = candidate
        plain = [replace(place, taken=0, alive=0) for place in places]
        return Prediction(
            Settings(balance, m, (k,) * len(balance), order),
            self._profile(m),
            tuple(plain),
            sizes_of(self._asked.rows, m),
            self._asked.around,
            tuple(devices),
        )

    def _with_outside(self, candidate: Candidate, places: Sequence[Place]) -> list[Place]:
        """The places, with what is around the layers on one of them, and what the caller has."""
        _, m, _, order = candidate
        outside = len(places) - 1 if self._asked.around == "last" else 0
        profile, sizes = self._profile(m), sizes_of(self._asked.rows, m)
        outputs = [profile.output.at(rows) for rows in sizes]
        had = max(outputs) if order.by_micro_batch else sum(outputs)
        held = profile.around.held_bytes + had
        return [
            replace(place, taken=place.taken + held) if j == outside else place
            for j, place in enumerate(places)
        ]

    def _devices(self, n: int) -> tuple[list[int], list[Place]]:
        """The ``n`` best devices, in order: the fastest, and of these the largest.

        With more stages than devices, stage j is on device j mod d.
        """
        places = self._asked.places
        best = sorted(range(len(places)), key=lambda d: (-places[d].speed, -places[d].memory, d))[
            :n
        ]
        found = [sorted(best)[j % len(best)] for j in range(n)]
        return found, [places[d] for d in found]

    def _profile(self, m: int) -> ModelProfile:
        """The one that was measured with the nearest number of rows."""
        rows = max(sizes_of(self._asked.rows, m))
        return min(self._asked.profiles, key=lambda each: max(each.rows / rows, rows / each.rows))

    def _least(self, candidate: Candidate) -> float:
        """A time below which no balance of a candidate comes.

        A micro-batch passes all stages, on the fastest device at best; the others follow through
        the slowest stage, which has its share of the layers at least. Until the first backward is
        back there, it has run as many forwards as there are stages at most, if the schedule does
        not run all of them before.
        """
        n, m, k, order = candidate
        devices, places = self._devices(n)
        speeds = [places[devices.index(device)].speed for device in {*devices}]
        through, share = 1 / max(speeds), 1 / sum(speeds)
        whole = self._whole(m, split=order.split)
        # Of forwards that drop and those that keep, the faster: a bound need not tell them apart.
        passing = min(whole.forward, whole.dropping)
        both = whole.backward + whole.weights
        if order.by_micro_batch:
            busy = (m * (passing + both) + k * whole.forward) * share
            if len({*devices}) < n:
                return max((passing + whole.backward) * through, busy)
            late = n if order.schedule == "zero_bubble" else 1
            after = max(0, m - n) * passing + (m - 1) * whole.backward
            after += max(0, m - late) * whole.weights + max(0, k - 1) * whole.forward
            return max((passing + whole.backward) * through + after * share, busy)
        forward = passing * (through + (m - 1) * share)
        again = (m * both + k * whole.forward) * share
        last = whole.backward * through + (m - 1) * both * share
        return forward + max(again, last)

    def _excess(self, candidate: Candidate) -> float:
        """The bytes that all devices together lack, whatever the balance."""
        devices, places = self._devices(candidate.stages)
        memory = sum(places[devices.index(device)].memory for device in {*devices})
        saved = self._whole(candidate.chunks).saved
        return self._held + _least_alive(candidate) * saved - memory

    @cached_property
    def _held(self) -> int:
        """The bytes of all layers, and of what is around them, whatever runs."""
        profile = self._asked.profiles[0]
        return sum(layer.held_bytes for layer in (*profile.layers, profile.around))

    def _whole(self, m: int, *, split: bool = False) -> StageCost:
        """What one of ``m`` micro-batches costs in all layers, at least."""
        if (m, split) not in self._wholes:
            profile, rows = self._profile(m), self._asked.rows // m
            (whole,) = costs_of(profile, [self._asked.layers], rows)
            if split:  # on some stages; where it is computed at once counts if that is faster
                inputs = sum(each.inputs.at(rows) for each in profile.layers if each.inputs)
                weights = sum(each.weights.at(rows) for each in profile.layers if each.weights)
                backward = min(inputs, whole.backward)
                both = min(inputs + weights, whole.backward)
                whole = whole._replace(backward=backward, weights=both - backward)
            self._wholes[m, split] = whole
        return self._wholes[m, split]


def _least_alive(candidate: Candidate) -> int:
    """How many micro-batches are alive on each stage at least."""
    _, m, k, order = candidate
    return max(1 if order.by_micro_batch and k < m else m - k, min(1, k))


def _few(numbers: Sequence[float]) -> list[float]:
    """The numbers; if there are many, rounded up."""
    if len({*numbers}) <= _ALIVE:
        return list(numbers)
    return [float(2 ** ceil(log2(each))) if each else 0.0 for each in numbers]
