"""Finds the fastest of the candidates that fit the memory of the devices.

Only few are balanced. Candidates that differ in recomputation only are a group: the more is
recomputed, the less memory is needed and the longer it takes, so the first that fits is found by
bisection. Each group first has a lower bound of its time; when no other one has a lower bound, its
candidates are balanced and predicted. The first whose predicted time comes up is the fastest, as in
A* search.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from heapq import heapify, heappop, heappush
from math import ceil, log2

from lightning_gpipe.core.balance import LayerCosts, ModelProfile, NothingFits, Place, solve_on
from lightning_gpipe.core.layout import Around, layer_ranges
from lightning_gpipe.core.planner.prediction import Prediction
from lightning_gpipe.core.planner.settings import (
    PlannedSettings,
    doubled,
    fewer_stages,
    numbers_recomputed,
)
from lightning_gpipe.core.planner.stage_cost import MicroBatchCost, costs_of, output_bytes, sizes_of
from lightning_gpipe.core.schedules import FILL_DRAIN, KINDS, ActivationCheckpointing, ScheduleKind

_TRIES = 3  # balances of a candidate: the memory of a stage is known only with a balance
_ALIVE = 8  # numbers that the solver tells apart; each has tables of its own


@dataclass(frozen=True)
class PlanSearch:
    """Balances, bounds and predicts candidates, each of them once.

    What is None is left to choose; ``orders`` are the kinds of schedules to choose from.
    """

    profiles: tuple[ModelProfile, ...]
    places: tuple[Place, ...]
    rows: int
    stages: int | None = None
    balance: tuple[int, ...] | None = None
    chunks: int | None = None
    most: int | None = None
    activation_checkpointing: ActivationCheckpointing | None = None
    around: Around = "last"
    orders: tuple[ScheduleKind, ...] = (FILL_DRAIN,)

    def is_measured(self, order: ScheduleKind) -> bool:
        """Return True if the times of the schedule's actions were measured."""
        return not order.split or all(profile.split for profile in self.profiles)

    @property
    def layers(self) -> int:
        return len(self.profiles[0].layers)

    def candidates(self) -> list[PlannedSettings]:
        """Return all combinations of what is left to choose, without balances."""
        most = min(len(self.places), self.layers)
        numbers = [self.stages] if self.stages else fewer_stages(most)
        return [
            PlannedSettings(n, m, k, order)
            for order in self.orders
            for n in numbers
            for m in self.numbers_of_micro_batches(n, order)
            for k in numbers_recomputed(m, self.activation_checkpointing)
        ]

    def numbers_of_micro_batches(self, stages: int, order: ScheduleKind) -> list[int]:
        """Return the numbers of micro-batches to try, the least first."""
        group = order.group(stages, min(stages, len(self.places)))
        tried = [self.chunks] if self.chunks else doubled(group, self.most or self.rows)
        return sorted({min(m, self.rows) for m in tried})

    def fastest(self, candidates: Iterable[PlannedSettings]) -> Prediction | None:
        """Return the prediction with the least time of those that fit; None if none does."""
        groups: dict[Hashable, list[PlannedSettings]] = {}
        for each in sorted(candidates, key=lambda each: each.recomputed):
            if self._excess(each) <= 0:
                groups.setdefault((each.order, each.stages, each.chunks), []).append(each)
        simplest = sorted(groups.values(), key=lambda group: KINDS.index(group[0].order))
        heap = [
            (self._bound(group[0]), place, False, group[0]) for place, group in enumerate(simplest)
        ]
        heapify(heap)
        while heap:
            _, place, predicted, candidate = heappop(heap)
            if predicted:
                return self.predicted(candidate)
            if (fitting := self._first_that_fits(simplest[place])) is not None:
                # Of those that are as fast, but for rounding, the first is the simplest.
                time = float(f"{self.predicted(fitting).time:.9g}")
                heappush(heap, (time, place, True, fitting))
        return None

    def _first_that_fits(self, candidates: Sequence[PlannedSettings]) -> PlannedSettings | None:
        """The first that fits, of candidates that need ever less memory, by bisection."""

        def fits(candidate: PlannedSettings) -> bool:
            return not any(self.predicted(candidate).missing)

        if fits(candidates[0]):
            return candidates[0]
        if not fits(candidates[-1]):
            return None
        last = len(candidates) - 1
        return candidates[bisect_left(candidates, True, 1, last, key=fits)]

    def nearest(self, candidates: Sequence[PlannedSettings]) -> Prediction:
        """Return, of candidates of which none fits, the one that lacks least where it lacks most.

        Of those that lack memory whatever the balance, only one is balanced.
        """
        excess = {candidate: self._excess(candidate) for candidate in candidates}
        least = min(excess, key=lambda candidate: excess[candidate])
        hopeful = [each for each in candidates if excess[each] <= 0 or each == least]
        return min(map(self.predicted, hopeful), key=lambda prediction: max(prediction.missing))

    @cached_property
    def predicted(self) -> Callable[[PlannedSettings], Prediction]:
        """A function that returns the prediction for a candidate with its best balance."""
        return cache(self._balanced)

    def _balanced(self, candidate: PlannedSettings) -> Prediction:
        """Balance a candidate by time and memory, which depends on the balance itself.

        The first balance assumes the least memory: fill-drain keeps what is not recomputed. If it
        does not fit, its prediction says how many micro-batches are alive on each stage, and how
        many bytes of inputs from other stages it holds.
        """
        if self.balance is not None:
            return self._with(candidate, self.balance)
        costs, places = self._costs(candidate), self._places(candidate)
        alive: Sequence[float] = [_least_alive(candidate)] * candidate.stages
        latest = best = None
        boundaries = 0.0
        for _ in range(_TRIES):
            pairs = zip(places, alive, strict=True)
            loaded = [replace(p, taken=p.taken + boundaries, alive=a) for p, a in pairs]
            try:
                balance = tuple(solve_on(costs, loaded))
            except NothingFits as error:
                balance = tuple(error.balance)
            if latest is not None and latest.settings.balance == balance:
                break
            latest = self._with(candidate, balance)
            if best is None or max(latest.missing) < max(best.missing):
                best = latest
            if not max(latest.missing):
                break
            boundaries = max(stage.memory.boundaries for stage in latest.stages)
            alive = _few(_alive(latest, alive))
        assert best is not None, "the loop has run"
        return best

    def _costs(self, candidate: PlannedSettings) -> LayerCosts:
        m, split = candidate.chunks, candidate.order.split
        profile, rows = self._profile(m), max(sizes_of(self.rows, m))
        sized = replace(profile, chunks=m, rows=rows)
        return LayerCosts(
            sized.times(recomputed=candidate.recomputed / m, split=split),
            [layer.held_bytes for layer in profile.layers],
            live=[layer.saved.at(rows) for layer in profile.layers],
        )

    def _with(self, candidate: PlannedSettings, balance: tuple[int, ...]) -> Prediction:
        devices = self._devices(candidate.stages)
        return Prediction(
            candidate._replace(balance=balance),
            self._profile(candidate.chunks),
            tuple(replace(self.places[d], taken=0, alive=0) for d in devices),
            sizes_of(self.rows, candidate.chunks),
            self.around,
            tuple(devices),
        )

    def _places(self, candidate: PlannedSettings) -> list[Place]:
        """Return the place of each stage, with the modules around and the outputs on one."""
        places = [self.places[d] for d in self._devices(candidate.stages)]
        outside = len(places) - 1 if self.around == "last" else 0
        profile = self._profile(candidate.chunks)
        outputs = output_bytes(profile, sizes_of(self.rows, candidate.chunks), candidate.order)
        around = places[outside].taken + profile.around.held_bytes + outputs
        places[outside] = replace(places[outside], taken=around)
        return places

    def _devices(self, n: int) -> list[int]:
        """The device of each stage, of the ``n`` best: the fastest, and of these the largest.

        With more stages than devices, stage j is on device j mod d.
        """
        places = self.places
        order = sorted(range(len(places)), key=lambda d: (-places[d].speed, -places[d].memory, d))
        best = sorted(order[:n])
        return [best[j % len(best)] for j in range(n)]

    def _profile(self, m: int) -> ModelProfile:
        """The profile that was measured with the nearest number of rows."""
        rows = max(sizes_of(self.rows, m))
        return min(self.profiles, key=lambda p: max(p.rows / rows, rows / p.rows))

    def _bound(self, candidate: PlannedSettings) -> float:
        """A lower bound of a candidate's time, whatever the balance.

        A micro-batch passes all stages, on the fastest device at best; the others follow through
        the slowest stage, which has at least its share of the layers. Until the first backward is
        back there, it has run at most as many forwards as there are stages, unless the schedule
        runs all of them before.
        """
        n, m, k, order, _ = candidate
        devices = {*self._devices(n)}
        speeds = [self.places[d].speed for d in devices]
        through, share = 1 / max(speeds), 1 / sum(speeds)
        whole = self._whole(m, order.split)
        # Of forwards that drop and those that keep, the faster: a bound need not tell them apart.
        forward = min(whole.forward, whole.dropping)
        both = whole.backward + whole.weights
        if not order.by_micro_batch:
            again = (m * both + k * whole.forward) * share
            last = whole.backward * through + (m - 1) * both * share
            return forward * (through + (m - 1) * share) + max(again, last)
        busy = (m * (forward + both) + k * whole.forward) * share
        if len(devices) < n:
            return max((forward + whole.backward) * through, busy)
        late = n if order.definition.defers_weights else 1
        after = max(0, m - n) * forward + (m - 1) * whole.backward
        after += max(0, m - late) * whole.weights + max(0, k - 1) * whole.forward
        return max((forward + whole.backward) * through + after * share, busy)

    def _excess(self, candidate: PlannedSettings) -> float:
        """The bytes that all devices together lack, whatever the balance."""
        memory = sum(self.places[d].memory for d in {*self._devices(candidate.stages)})
        saved = self._whole(candidate.chunks, False).saved
        return self._held + _least_alive(candidate) * saved - memory

    @cached_property
    def _held(self) -> int:
        """The bytes of all layers and of the modules around them, whatever runs."""
        profile = self.profiles[0]
        return sum(layer.held_bytes for layer in (*profile.layers, profile.around))

    @cached_property
    def _whole(self) -> Callable[[int, bool], MicroBatchCost]:
        return cache(self._least_cost)

    def _least_cost(self, m: int, split: bool) -> MicroBatchCost:
        """The least cost of one of ``m`` micro-batches in all layers."""
        profile, rows = self._profile(m), self.rows // m
        (whole,) = costs_of(profile, [self.layers], rows)
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
    m, k = candidate.chunks, candidate.recomputed
    return max(1 if candidate.order.by_micro_batch and k < m else m - k, min(1, k))


def _alive(prediction: Prediction, before: Sequence[float]) -> list[float]:
    """The micro-batches that each stage holds at its peak; as before where layers save nothing."""
    rows, layers, alive = max(prediction.rows), prediction.profile.layers, []
    ranges = layer_ranges(prediction.settings.balance)
    for stage, own, guess in zip(prediction.stages, ranges, before, strict=True):
        saved = sum(layers[k].saved.at(rows) for k in own)
        alive.append(stage.memory.activations / saved if saved else guess)
    return alive


def _few(numbers: Sequence[float]) -> list[float]:
    """The numbers; if there are many different ones, rounded up to powers of two."""
    if len({*numbers}) <= _ALIVE:
        return list(numbers)
    return [float(2 ** ceil(log2(number))) if number else 0.0 for number in numbers]
