"""Finds the fastest of the candidates that fit the memory of the devices.

Only few are balanced. Each candidate first has a lower bound of its time; when no other one has a
lower bound, it is balanced and predicted. The first whose predicted time comes up is the fastest,
as in A* search. How many micro-batches each stage recomputes is part of its balance: the solver
knows that more layers leave room for fewer activations.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from heapq import heapify, heappop, heappush
from itertools import product
from math import ceil, inf, log2
from typing import Literal

from lightning_gpipe.core.balance import (
    LayerCosts,
    ModelProfile,
    NothingFits,
    Place,
    solve_on,
    time_costs,
)
from lightning_gpipe.core.layout import SHARDINGS, Around, ShardingName, Weights, outside_stage
from lightning_gpipe.core.planner.action_costs import ActionCosts
from lightning_gpipe.core.planner.bounds import LowerBounds
from lightning_gpipe.core.planner.predicted_stage import HeldShares, Memory
from lightning_gpipe.core.planner.prediction import Prediction
from lightning_gpipe.core.planner.row_actions import row_actions
from lightning_gpipe.core.planner.settings import PlannedSettings, doubled, fewer_stages
from lightning_gpipe.core.planner.stage_cost import MicroBatchCost, costs_of, output_bytes, sizes_of
from lightning_gpipe.core.schedules import (
    KINDS,
    ActivationCheckpointing,
    ScheduleKind,
    held_at_once,
    recomputed_by_stage,
)

_TRIES = 3  # balances of a candidate: the memory of a stage is known only with a balance
_ALIVE = 8  # numbers that the solver tells apart; each has tables of its own


@dataclass(frozen=True)
class PlanSearch:
    """Balances, bounds and predicts candidates, each of them once.

    What is None is left to choose; of ``orders``, the kinds of schedules, ``weights``, ``offload``
    and ``sharding`` all choices are listed. ``every_device`` must have a stage. The ``predictions``
    are shared with the searches among other settings that are made from this one.
    """

    profiles: tuple[ModelProfile, ...]
    places: tuple[Place, ...]
    rows: int
    stages: int | None
    balance: tuple[int, ...] | None
    chunks: int | None
    most: int | None
    activation_checkpointing: ActivationCheckpointing | None
    around: Around
    orders: tuple[ScheduleKind, ...]
    weights: tuple[Weights, ...]
    offload: tuple[bool | tuple[int, ...] | Literal["auto"], ...]
    sharding: tuple[ShardingName | None, ...]
    replicas: int
    every_device: bool
    predictions: dict[Hashable, Prediction] = field(default_factory=dict, repr=False, compare=False)

    def is_measured(self, order: ScheduleKind) -> bool:
        return not order.split or all(profile.split for profile in self.profiles)

    @property
    def layers(self) -> int:
        return len(self.profiles[0].layers)

    def candidates(self) -> list[PlannedSettings]:
        mode = self.activation_checkpointing
        return [
            PlannedSettings(
                n, m, numbers, order, weights=weights, offload=offload, sharding=sharding
            )
            for weights, sharding, offload, order in product(
                self.weights, self.sharding, self.offload, self.orders
            )
            if weights == "device" or sharding == self.sharding[0] != "parameters"
            for n in self.numbers_of_stages(order, weights, sharding)
            for m in self.numbers_of_micro_batches(n, order)
            for numbers in [() if mode is None else recomputed_by_stage(mode, m, n)]
            if order.possible(m, order.placement(n, len(self.places)))
        ]

    def numbers_of_stages(
        self, order: ScheduleKind, weights: Weights, sharding: ShardingName | None
    ) -> list[int]:
        """Return the numbers of stages to try; more than devices, too, if weights come and go."""
        devices = min(len(self.places), self.layers)
        if self.stages:
            return [self.stages]
        if order.definition.folded:
            return [2 * devices] if 2 * devices <= self.layers and weights == "device" else []
        if weights == "host" or sharding == "parameters":
            most = self.layers // devices
            return [devices * loops for loops in sorted({*doubled(1, most), most})]
        return [devices] if self.every_device else fewer_stages(devices)

    def numbers_of_micro_batches(self, stages: int, order: ScheduleKind) -> list[int]:
        group = order.group(stages, min(stages, len(self.places)))
        tried = [self.chunks] if self.chunks else doubled(group, self.most or self.rows)
        return sorted({min(m, self.rows) for m in tried})

    def fastest(self, candidates: Iterable[PlannedSettings]) -> Prediction | None:
        hopeful = [each for each in candidates if self._bounds.excess(each) <= 0]
        simplest = sorted(hopeful, key=_complexity)
        heap = [(self._bounds.time(each), place, False) for place, each in enumerate(simplest)]
        heapify(heap)
        while heap:
            _, place, done = heappop(heap)
            prediction = self.predicted(simplest[place])
            if done:
                return prediction
            if not any(prediction.missing):
                # Of those that are as fast, but for rounding, the first is the simplest.
                heappush(heap, (float(f"{prediction.time:.9g}"), place, True))
        return None

    def nearest(self, candidates: Sequence[PlannedSettings]) -> Prediction:
        """Return, of candidates that do not fit, the one that lacks least where it lacks most."""
        excess = {candidate: self._bounds.excess(candidate) for candidate in candidates}
        least = min(excess, key=lambda candidate: excess[candidate])
        hopeful = [each for each in candidates if excess[each] <= 0 or each == least]
        return min(map(self.predicted, hopeful), key=lambda prediction: max(prediction.missing))

    @cached_property
    def _bounds(self) -> LowerBounds:
        return LowerBounds(self.profiles, self.places, self.rows, self.replicas)

    def predicted(self, candidate: PlannedSettings) -> Prediction:
        key = candidate, self.places, self.balance
        if key not in self.predictions:
            self.predictions[key] = self._balanced(candidate)
        return self.predictions[key]

    def _balanced(self, candidate: PlannedSettings) -> Prediction:
        """Balance a candidate by time and memory, which depends on the balance itself.

        The first balance assumes that no inputs from other stages are held; if it does not fit, its
        prediction says how many bytes they are.
        """
        if self.balance is not None:
            return self._fitted(candidate, self.balance)
        if candidate.stages == self.layers:
            return self._fitted(candidate, (1,) * self.layers)
        costs, places = self._costs(candidate), self._places(candidate)
        latest = best = None
        held = [0.0] * candidate.stages  # inputs from other stages
        for _ in range(_TRIES):
            pairs = zip(places, held, strict=True)
            loaded = [replace(place, taken=place.taken + size) for place, size in pairs]
            try:
                balance = tuple(solve_on(costs, loaded))
            except NothingFits as error:
                balance = tuple(error.balance)
            if latest is not None and latest.settings.balance == balance:
                break
            latest = self._fitted(candidate, balance)
            if best is None or _merit(latest) < _merit(best):
                best = latest
            if not max(latest.missing) and not any(latest.settings.recomputed):
                break
            held = _few([stage.memory.boundaries for stage in latest.stages])
        assert best is not None, "the loop has run"
        return best

    def _fitted(self, candidate: PlannedSettings, balance: tuple[int, ...]) -> Prediction:
        """Predict a balance; where that is open, each device recomputes and moves what it must."""
        if not candidate.recomputed:
            keeping = self._with(candidate._replace(recomputed=(0,) * candidate.stages), balance)
            candidate = candidate._replace(recomputed=keeping.least_recomputed())
        if candidate.offload == "auto":
            candidate = candidate._replace(offload=self._with(candidate, balance).least_offloaded())
        return self._with(candidate, balance)

    def _costs(self, candidate: PlannedSettings) -> LayerCosts:
        m, split = candidate.chunks, candidate.order.split
        profile, rows = self._bounds.profile(m), max(sizes_of(self.rows, m))
        costs = time_costs(replace(profile, chunks=m, rows=rows), split=split)
        if candidate.weights == "device" and candidate.sharding is None:
            return costs
        # A device has the weights of two stages at once, and the activations of all.
        loops = ceil(candidate.stages / len(self.places))
        whole = min(loops, 2)
        shares = HeldShares.of_stages(candidate, self.replicas)
        parameters, gradients = (whole + (loops - whole) * share for share in shares[:2])
        states = loops * shares.optimizer
        held = [
            parameters * layer.parameter_bytes
            + gradients * layer.gradient_bytes
            + states * layer.optimizer_bytes
            + layer.buffer_bytes
            for layer in profile.layers
        ]
        return replace(costs, memory=held, live=[loops * size for size in costs.live])

    def _with(self, candidate: PlannedSettings, balance: tuple[int, ...]) -> Prediction:
        devices, profile = self._bounds.devices(candidate), self._bounds.profile(candidate.chunks)
        # Operations are no seconds, so that what is counted in them tells no time of transfers.
        timeless = profile.unit == "FLOP"
        kinds = {
            place: replace(
                place,
                taken=0,
                alive=0,
                host_speed=inf if timeless else place.host_speed,
                replica_speed=inf if timeless else place.replica_speed,
            )
            for place in {*self.places}
        }
        return Prediction(
            candidate._replace(balance=balance),
            profile,
            tuple(kinds[self.places[d]] for d in devices),
            sizes_of(self.rows, candidate.chunks),
            self.around,
            tuple(devices),
            self.replicas,
        )

    def _places(self, candidate: PlannedSettings) -> list[Place]:
        m, n = candidate.chunks, candidate.stages
        places = [self.places[d] for d in self._bounds.devices(candidate)]
        if numbers := candidate.recomputed:
            alive = self._alive(candidate, numbers)
            pairs = zip(places, alive, numbers, strict=True)
            places = [replace(place, alive=a, extra=k / m) for place, a, k in pairs]
        else:
            most, least = (self._alive(candidate, (k,) * n) for k in (0, m))
            bounds = zip(places, most, least, strict=True)
            places = [replace(p, alive=a, least=b, micro_batches=m) for p, a, b in bounds]
        outside = outside_stage(self.around, len(places))
        profile = self._bounds.profile(m)
        outputs = output_bytes(profile, sizes_of(self.rows, m), candidate.order)
        shares = HeldShares.around_stages(candidate, self.replicas)
        held = Memory.of([profile.around]).divided(shares).held
        around = places[outside].taken + held + outputs
        places[outside] = replace(places[outside], taken=around)
        return places

    def _alive(self, candidate: PlannedSettings, recomputed: tuple[int, ...]) -> list[float]:
        """The number of micro-batches that each stage holds at the peak of its device."""
        offload, most = candidate.offload, 2.0 + candidate.order.by_micro_batch
        under_way = [most - (k >= candidate.chunks) for k in recomputed]
        if offload is True or offload == "auto":
            return under_way
        alive = self._alive_at_peak(candidate.order, candidate.chunks, recomputed)
        if not offload:
            return alive
        left = [a - k + min(k, most) for a, k in zip(alive, offload, strict=True)]
        return list(map(max, left, under_way))

    @cached_property
    def _alive_at_peak(self) -> Callable[[ScheduleKind, int, tuple[int, ...]], list[float]]:
        return cache(self._counted)

    def _counted(self, order: ScheduleKind, m: int, recomputed: tuple[int, ...]) -> list[float]:
        n = len(recomputed)
        if not order.by_micro_batch:
            return [float(held_at_once(m, k)) for k in recomputed]
        (whole,) = costs_of(
            self._bounds.profile(m), [self.layers], self.rows // m, split=order.split
        )
        left = whole.left / whole.saved if whole.saved else 0.0
        one = MicroBatchCost(1.0, 1.0, 1.0, saved=1.0, weights=1.0, left=left)
        costs = ActionCosts({1: [one] * n}, [1] * m, recomputed, [Place()] * n)
        placement = order.placement(n, len(self.places))
        rows = row_actions(order, m, placement, recomputed)
        if order.definition.patterns is None:
            return _few(costs.at_peaks(rows)[:, 0].tolist())
        peaks = [costs.peak_of(row) for row in rows.rows()]
        return _few([peaks[worker] * len(peaks) / n for worker in placement])


def _complexity(candidate: PlannedSettings) -> tuple[bool, int, bool, int]:
    """A number that is less for what is simpler."""
    order = KINDS.index(candidate.order) if candidate.order in KINDS else len(KINDS)
    sharding = SHARDINGS.index(candidate.sharding)
    return candidate.weights == "host", sharding, bool(candidate.offload), order


def _merit(prediction: Prediction) -> tuple[float, float]:
    """A number that is less for what lacks less memory or, if none, takes less time."""
    return max(prediction.missing), prediction.time


def _few(numbers: Sequence[float]) -> list[float]:
    """The numbers; if there are many different ones, rounded up to powers of two."""
    if len({*numbers}) <= _ALIVE:
        return list(numbers)
    return [float(2 ** ceil(log2(number))) if number else 0.0 for number in numbers]
