"""Chooses the stages, the balance, the micro-batches and the recomputation of a pipeline.

What is fastest depends on all of them at once: more micro-batches make the bubble smaller and each
of them less efficient, recomputation makes room and takes time, more stages make the bubble larger.
So all combinations are candidates, and the least predicted time wins of those that fit the memory.

Only few are balanced. Each candidate first has a bound, below which its time cannot be; when no
other one has a lower bound, it is balanced and its time predicted. The first whose predicted time
comes up is the fastest, as in A* search.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Any, NamedTuple

from lightning_gpipe.core.plan.balance.by_profile import memory_costs, time_costs
from lightning_gpipe.core.plan.balance.costs import LayerCosts, Place
from lightning_gpipe.core.plan.balance.solver import NothingFits, solve_on
from lightning_gpipe.core.plan.layout import Around
from lightning_gpipe.core.plan.measured import ModelProfile
from lightning_gpipe.core.plan.prediction import (
    Prediction,
    Settings,
    StageCost,
    costs_of,
    sizes_of,
)
from lightning_gpipe.core.plan.recompute import ActivationCheckpointing, count_recomputed

_GIB = 2**30
_TRIES = 2  # balances of a candidate: what enters a stage is known when there is one


class Candidate(NamedTuple):
    """A combination that is not balanced yet.

    Attributes:
        stages: The number of stages.
        chunks: The number of micro-batches.
        recomputed: How many of them each stage recomputes.
    """

    stages: int
    chunks: int
    recomputed: int

    def __str__(self) -> str:
        return f"{self.stages} stages, chunks={self.chunks}, {self.recomputed} recomputed"


@dataclass(frozen=True)
class Alternative:
    """What else could have been chosen.

    Attributes:
        prediction: What it would take, and need.
        reason: Why it was not chosen.
    """

    prediction: Prediction
    reason: str

    def as_dict(self) -> dict[str, Any]:
        """As for JSON."""
        return {**self.prediction.as_dict(), "reason": self.reason}


@dataclass(frozen=True)
class Plan:
    """What was chosen for a pipeline, and what it is predicted to take.

    Attributes:
        prediction: The settings, with the time and the memory of a mini-batch.
        alternatives: Others, and why they lost.
    """

    prediction: Prediction
    alternatives: tuple[Alternative, ...] = ()

    @property
    def settings(self) -> Settings:
        """What was chosen."""
        return self.prediction.settings

    def as_dict(self) -> dict[str, Any]:
        """Numbers, strings, lists and dicts, as for JSON."""
        others = [each.as_dict() for each in self.alternatives]
        return {**self.prediction.as_dict(), "alternatives": others}

    def __str__(self) -> str:
        return str(self.prediction)


class NoPlan(ValueError):
    """No plan fits the memory of the devices.

    Attributes:
        nearest: The one that lacks least where it lacks most.
        needed: The bytes per device with which it fits.
    """

    def __init__(self, nearest: Prediction) -> None:
        self.nearest = nearest
        self.needed = max(stage.memory.total for stage in nearest.stages)
        missing = ", ".join(
            f"{lack / _GIB:.3g} GiB on device {stage.device} (stage {j}: "
            f"{stage.memory.total / _GIB:.3g} of {stage.limit / _GIB:.3g} GiB)"
            for j, (stage, lack) in enumerate(zip(nearest.stages, nearest.missing, strict=True))
            if lack
        )
        chosen = nearest.settings
        super().__init__(
            "a plan must fit the memory of the devices: none does. The nearest one, "
            f"balance={list(chosen.balance)}, chunks={chosen.chunks}, activation_checkpointing="
            f"{chosen.activation_checkpointing!r}, lacks {missing}; it fits devices of "
            f"{self.needed / _GIB:.3g} GiB. Use more devices, or devices with more memory, or "
            "batches with fewer rows."
        )


def plan_for(
    profiles: ModelProfile | Sequence[ModelProfile],
    places: Sequence[Place],
    *,
    rows: int | None = None,
    stages: int | None = None,
    balance: Sequence[int] | None = None,
    chunks: int | None = None,
    most: int | None = None,
    activation_checkpointing: ActivationCheckpointing | None = None,
    around: Around = "last",
) -> Plan:
    """The plan with the least predicted time of those that fit the devices.

    Args:
        profiles: What the layers cost; of several, which were measured with micro-batches of
            different sizes, the one with the nearest number of rows counts.
        places: The devices: their speeds and memory.
        rows: The number of rows of a mini-batch; None takes what was measured.
        stages: Their number; None takes up to one per device.
        balance: The number of layers in each stage; None finds the best one.
        chunks: The number of micro-batches; None tries the powers of two.
        most: The most micro-batches to try; None tries as many as there are rows.
        activation_checkpointing: Which of them are recomputed; None finds as few as fit.
        around: Which stage what is around the layers is with.

    Raises:
        ValueError: If there is nothing to choose from.
        NoPlan: If nothing fits.
    """
    found = [profiles] if isinstance(profiles, ModelProfile) else list(profiles)
    planner = _Planner(found, places, rows or found[0].rows * found[0].chunks, balance, around)
    if balance is not None:
        stages = len(balance)
    if stages is not None and not 1 <= stages <= len(places):
        raise ValueError(
            f"a plan has a device for each stage: got {stages} stages and {len(places)} devices. "
            "Give as many devices as stages."
        )
    layers = len(found[0].layers)
    numbers = [stages] if stages else _fewer(min(len(places), layers))
    tried = [chunks] if chunks else _powers_of_two(most or planner.rows)
    candidates = [
        Candidate(n, m, k)
        for n in numbers
        for m in sorted({min(each, planner.rows) for each in tried})
        for k in _shares(m, activation_checkpointing)
    ]
    best = planner.fastest(candidates)
    others = [each for each in _near(best, candidates) if each != best]
    return Plan(planner.predicted(best), tuple(planner.compared(best, others)))


class _Planner:
    """Balances, bounds and predicts candidates, each of them once."""

    def __init__(
        self,
        profiles: Sequence[ModelProfile],
        places: Sequence[Place],
        rows: int,
        balance: Sequence[int] | None,
        around: Around,
    ) -> None:
        self.rows = rows
        self._profiles, self._places = profiles, list(places)
        self._balance, self._around = balance, around
        self._balanced: dict[Candidate, Prediction] = {}
        self._wholes: dict[int, StageCost] = {}

    def fastest(self, candidates: Iterable[Candidate]) -> Candidate:
        """The candidate with the least time of those that fit.

        Raises:
            NoPlan: If none fits.
        """
        order = count()
        heap: list[tuple[float, int, bool, Candidate]] = []
        hopeless: list[tuple[float, int, Candidate]] = []
        lost: list[Prediction] = []
        for each in candidates:
            excess = self._excess(each)
            if excess > 0:
                hopeless.append((excess, next(order), each))
            else:
                heappush(heap, (self._least(each), next(order), False, each))
        while heap:
            _, _, predicted, candidate = heappop(heap)
            if predicted:
                return candidate
            found = self.predicted(candidate)
            if max(found.missing) > 0:
                lost.append(found)
            else:
                heappush(heap, (found.time, next(order), True, candidate))
        if hopeless:
            lost.append(self.predicted(min(hopeless)[-1]))
        raise NoPlan(min(lost, key=lambda found: max(found.missing)))

    def predicted(self, candidate: Candidate) -> Prediction:
        """What a candidate takes, balanced as well as can be."""
        if candidate not in self._balanced:
            self._balanced[candidate] = self._best_balanced(candidate)
        return self._balanced[candidate]

    def compared(self, best: Candidate, others: Iterable[Candidate]) -> Iterator[Alternative]:
        """Say why others lost."""
        chosen = self.predicted(best)
        for other in others:
            found = self.predicted(other)
            yield Alternative(found, _reason(chosen, found, best, other))

    def _best_balanced(self, candidate: Candidate) -> Prediction:
        """Balance a candidate, inputs from other stages included: they follow from a balance."""
        devices, places = self._devices(candidate.stages)
        profile = self._profile(candidate.chunks)
        if self._balance is not None:
            return self._with(candidate, tuple(self._balance), devices, places)
        costs = _costs(profile, candidate, max(sizes_of(self.rows, candidate.chunks)))
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
        sizes = sizes_of(self.rows, m)
        profile = self._profile(m)
        return Prediction(settings, profile, tuple(places), sizes, self._around, tuple(devices))

    def _with_around(self, profile: ModelProfile, places: Sequence[Place]) -> list[Place]:
        """The places, with what is around the layers on one of them."""
        outside = len(places) - 1 if self._around == "last" else 0
        held = profile.around.held_bytes
        return [
            replace(place, taken=place.taken + held) if j == outside else place
            for j, place in enumerate(places)
        ]

    def _devices(self, n: int) -> tuple[list[int], list[Place]]:
        """The ``n`` best devices, in order: the fastest, and of these the largest."""
        best = sorted(
            range(len(self._places)),
            key=lambda d: (-self._places[d].speed, -self._places[d].memory, d),
        )[:n]
        return sorted(best), [self._places[d] for d in sorted(best)]

    def _profile(self, m: int) -> ModelProfile:
        """The one that was measured with the nearest number of rows."""
        rows = max(sizes_of(self.rows, m))
        return min(self._profiles, key=lambda each: max(each.rows / rows, rows / each.rows))

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
        profile = self._profile(m)
        held = sum(layer.held_bytes for layer in (*profile.layers, profile.around))
        alive = max(m - k, min(1, k))
        return held + alive * self._whole(m).saved - sum(place.memory for place in places)

    def _whole(self, m: int) -> StageCost:
        """What one of ``m`` micro-batches costs in all layers, at least."""
        if m not in self._wholes:
            layers = len(self._profiles[0].layers)
            (self._wholes[m],) = costs_of(self._profile(m), [layers], self.rows // m)
        return self._wholes[m]


def _costs(profile: ModelProfile, candidate: Candidate, rows: int) -> LayerCosts:
    """What the solver goes by, for micro-batches with so many rows."""
    _, m, k = candidate
    asked = replace(profile, chunks=m, rows=rows)
    return LayerCosts(time_costs(asked, k).times, memory_costs(asked, k).times)


def _fewer(devices: int) -> list[int]:
    """The numbers of stages to try: all, or of many devices their halves."""
    if devices <= 16:
        return list(range(1, devices + 1))
    return sorted({max(1, devices >> shift) for shift in range(devices.bit_length())})


def _powers_of_two(rows: int) -> list[int]:
    return [1 << shift for shift in range(rows.bit_length())]


def _shares(m: int, mode: ActivationCheckpointing | None) -> list[int]:
    """The numbers of micro-batches to recompute that are tried."""
    if mode is not None:
        return [count_recomputed(mode, m)]
    eighths = {round(m * eighth / 8) for eighth in range(9)}
    return sorted(eighths | {m - 1, m})


def _near(best: Candidate, candidates: Sequence[Candidate]) -> Iterator[Candidate]:
    """Those that differ from the best one in one thing, next to it; and no or all recomputed."""
    n, m, k = best
    share = k / m
    stages = sorted({each.stages for each in candidates})
    chunks = sorted({each.chunks for each in candidates})
    recomputed = sorted({each.recomputed for each in candidates if each[:2] == (n, m)})
    for other in _beside(stages, n):
        yield Candidate(other, m, k)
    for other in _beside(chunks, m):
        yield _nearest(share, [each for each in candidates if each[:2] == (n, other)])
    for other in sorted({recomputed[0], *_beside(recomputed, k), recomputed[-1]}):
        yield Candidate(n, m, other)


def _beside(values: Sequence[int], value: int) -> list[int]:
    """What is next to a value, on either side."""
    k = values.index(value)
    return [*values[max(0, k - 1) : k], *values[k + 1 : k + 2]]


def _nearest(share: float, candidates: Sequence[Candidate]) -> Candidate:
    return min(candidates, key=lambda each: abs(each.recomputed / each.chunks - share))


def _reason(chosen: Prediction, other: Prediction, best: Candidate, candidate: Candidate) -> str:
    """Why another candidate was not chosen."""
    lacking = [(lack, j) for j, lack in enumerate(other.missing) if lack]
    if lacking:
        lack, j = max(lacking)
        return f"lacks {lack / _GIB:.3g} GiB on stage {j}"
    slower = other.time / chosen.time - 1 if chosen.time else inf
    if slower <= 0:
        return "as fast, and no simpler"
    if candidate.recomputed > best.recomputed and candidate.chunks == best.chunks:
        why = "more is recomputed"
    elif other.bubble > chosen.bubble:
        why = f"bubble {other.bubble:.0%}, not {chosen.bubble:.0%}"
    elif candidate.stages < best.stages:
        why = "fewer devices compute"
    else:
        why = "smaller micro-batches take longer for each row"
    return f"{slower:.1%} slower: {why}"
