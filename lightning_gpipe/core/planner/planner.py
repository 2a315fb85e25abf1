"""Chooses stages, balance, schedule, micro-batches and recomputation of a pipeline.

What is fastest depends on all of them at once: more micro-batches make the bubble smaller and each
of them less efficient, recomputation makes room and takes time. So all combinations are candidates,
and of those that fit the memory the one with the least predicted time wins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, product
from math import inf
from typing import Any, Literal

from lightning_gpipe.core.balance import ModelProfile, Place
from lightning_gpipe.core.layout import Around, ShardingName, Weights, check_even
from lightning_gpipe.core.planner.no_plan import NoPlan, fitting_plans
from lightning_gpipe.core.planner.prediction import Prediction
from lightning_gpipe.core.planner.schedule_search import with_block
from lightning_gpipe.core.planner.search import PlanSearch
from lightning_gpipe.core.planner.settings import PlannedSettings, near
from lightning_gpipe.core.schedules import (
    KINDS,
    ActivationCheckpointing,
    OffloadActivations,
    ScheduleKind,
    ScheduleName,
    check_activation_checkpointing,
    check_by_micro_batch,
    check_offload_activations,
    counted,
    kinds_for,
)

_SAME = 1e-6  # the relative difference up to which times are the same


@dataclass(frozen=True)
class Alternative:
    """Settings that were not chosen, with their time and memory, and why."""

    prediction: Prediction
    reason: str

    def as_dict(self) -> dict[str, Any]:
        return {**self.prediction.as_dict(), "reason": self.reason}


@dataclass(frozen=True)
class Plan:
    """The settings that were chosen for a pipeline, and their predicted time and memory.

    It prints as one line; the plan command shows it as tables.

    Attributes:
        prediction: The settings, with the time and the memory of a mini-batch.
        alternatives: Other settings, and why they were not chosen.
    """

    prediction: Prediction
    alternatives: tuple[Alternative, ...] = ()

    @property
    def settings(self) -> PlannedSettings:
        """The balance, the number of micro-batches, the schedule and the other settings."""
        return self.prediction.settings

    def as_dict(self) -> dict[str, Any]:
        """Return nested dicts and lists of numbers and strings, for JSON."""
        alternatives = [alternative.as_dict() for alternative in self.alternatives]
        return {**self.prediction.as_dict(), "alternatives": alternatives}

    def __str__(self) -> str:
        return str(self.prediction)


def plan_for(
    profiles: ModelProfile | Sequence[ModelProfile],
    places: Sequence[Place],
    *,
    stages: int | None = None,
    balance: Sequence[int] | None = None,
    chunks: int | None = None,
    most: int | None = None,
    activation_checkpointing: ActivationCheckpointing | None = None,
    schedule: ScheduleName | Literal["auto"] = "fill_drain",
    split_backward: bool | None = False,
    around: Around = "last",
    weights: Sequence[Weights] = ("device",),
    offload: Sequence[OffloadActivations | Literal["auto"]] = (False,),
    sharding: Sequence[ShardingName | None] = (None,),
    replicas: int = 1,
    every_device: bool = False,
) -> Plan:
    """Return the plan with the least predicted time of those that fit the devices.

    Arguments that are not here are those of :func:`lightning_gpipe.plan`, with all choices listed
    where there are several; what comes later is taken only if nothing before fits.

    Args:
        profiles: The costs of the layers; of several profiles, measured with micro-batches of
            different sizes, the one with the nearest number of rows is used.
        most: The most micro-batches to try; None tries as many as there are rows.
        every_device: Whether each device must have a stage.

    Raises:
        ValueError: If numbers do not fit the devices, or the schedule cannot be planned.
        NoPlan: If nothing fits.
    """
    profiles = (profiles,) if isinstance(profiles, ModelProfile) else tuple(profiles)
    if balance is not None:
        stages = len(balance)
    listed = [x for x in (activation_checkpointing, *offload) if isinstance(x, list | tuple)]
    if stages is None and listed:
        stages = len(listed[0])
    if activation_checkpointing is not None:
        check_activation_checkpointing(activation_checkpointing, stages)
    for choice in offload:
        if choice != "auto":
            check_offload_activations(choice, stages)
    search = PlanSearch(
        profiles,
        tuple(places),
        profiles[0].rows * profiles[0].chunks,
        stages,
        None if balance is None else tuple(balance),
        chunks,
        most,
        activation_checkpointing,
        around,
        kinds_for(schedule, split_backward),
        tuple(weights),
        tuple(x if isinstance(x, bool | str) else tuple(x) for x in offload),
        tuple(sharding),
        replicas,
        every_device,
    )
    if split_backward is None or schedule == "auto":
        search = replace(search, orders=tuple(filter(search.is_measured, search.orders)))
    _check(search)
    candidates = search.candidates()
    if not candidates:
        raise ValueError(
            "a plan must have a schedule that the layers and devices allow: got "
            f"{', '.join(map(str, search.orders))} for {counted(search.layers, 'layer')} on "
            f"{counted(len(places), 'device')}. Schedules in the form of a V need two layers for "
            "each device."
        )
    named = next(filter(None, map(search.fastest, _simplest_first(candidates))), None)
    if named is None:
        raise NoPlan(search.nearest(candidates), fitting_plans(search))
    chosen = named
    if schedule == "auto":
        chosen = with_block(named, {order.split for order in search.orders})
    others = [
        *([named] if named is not chosen else []),
        *map(search.predicted, near(named.settings, candidates)),
        *_in_other_ways(search, named.settings),
    ]
    alternatives = (Alternative(other, _reason(chosen, other, search.orders)) for other in others)
    return Plan(chosen, tuple(alternatives))


def _simplest_first(candidates: Sequence[PlannedSettings]) -> Iterator[Sequence[PlannedSettings]]:
    """Yield the candidates that divide nothing among replicas, then those that divide more.

    Last are those with weights on the host, as no prediction includes the optimizer's step.
    """
    for _, alike in groupby(candidates, lambda candidate: (candidate.weights, candidate.sharding)):
        yield list(alike)


def _check(search: PlanSearch) -> None:
    stages, devices = search.stages, len(search.places)
    if stages is not None and stages > search.layers:
        raise ValueError(
            f"a plan has a layer for each stage at least: got {counted(stages, 'stage')} for "
            f"{counted(search.layers, 'layer')}."
        )
    for order in search.orders:
        if order.definition.folded and search.weights == ("host",):
            raise ValueError(
                f"{order} is planned with weights on the devices: got weights='host'. Write "
                "numbers, or another schedule."
            )
        if order.definition.folded and stages is not None:
            m = search.numbers_of_micro_batches(stages, order)[0]
            check_by_micro_batch(order.schedule, m, order.placement(stages, devices))
            return
    if stages is None or 1 <= stages <= devices:
        return
    visits = "host" in search.weights or "parameters" in search.sharding
    if search.balance is None and not visits:
        raise ValueError(
            f"a plan has a device for each stage: got {counted(stages, 'stage')} and "
            f"{counted(devices, 'device')}. Give as many devices as stages, or a balance, or "
            "weights='host'."
        )
    check_even(stages, devices, "Use a number of devices that divides the number of stages.")
    named = len({order.schedule for order in search.orders}) == 1
    for order in search.orders:
        if order.by_micro_batch and named:  # of several, a candidate is possible
            m = search.numbers_of_micro_batches(stages, order)[0]
            check_by_micro_batch(order.schedule, m, order.placement(stages, devices))


def _in_other_ways(search: PlanSearch, best: PlannedSettings) -> Iterator[Prediction]:
    """Yield the fastest of each other kind of schedule, with as many stages and micro-batches.

    Then, where they were to be chosen, the fastest with weights or activations elsewhere.
    """
    offload = next(choice for choice in search.offload if bool(choice) == bool(best.offload))
    here = replace(search, weights=(best.weights,), offload=(offload,), sharding=(best.sharding,))
    for order in KINDS:
        placement = order.placement(best.stages, len(search.places))
        if order != best.order and order.possible(best.chunks, placement):
            same = replace(here, stages=best.stages, chunks=best.chunks, orders=(order,))
            yield from _fastest_or_nearest(same)
    for weights, offload, sharding in product(search.weights, search.offload, search.sharding):
        possible = weights == "device" or sharding == search.sharding[0]
        if possible and (weights, bool(offload), sharding) != best.places:
            yield from _fastest_or_nearest(
                replace(search, weights=(weights,), offload=(offload,), sharding=(sharding,))
            )


def _fastest_or_nearest(search: PlanSearch) -> Iterator[Prediction]:
    measured = replace(search, orders=tuple(filter(search.is_measured, search.orders)))
    if candidates := measured.candidates():
        yield measured.fastest(candidates) or measured.nearest(candidates)


def _reason(chosen: Prediction, other: Prediction, orders: Sequence[ScheduleKind]) -> str:
    """Return why another candidate was not chosen, where ``orders`` were to be chosen from."""
    lacking = [(lack, j) for j, lack in enumerate(other.missing) if lack]
    if lacking:
        lack, j = max(lacking)
        return f"lacks {lack / 2**30:.3g} GiB on stage {j}"
    order = other.settings.order
    slower = other.time / chosen.time - 1 if chosen.time else inf
    if slower < -_SAME and order not in orders:
        if order.by_micro_batch and not chosen.settings.order.by_micro_batch:
            needs = "a loss for each micro-batch: training_step is called with each"
        else:
            needs = "to be asked for"
        return f"{-slower:.1%} less time, but needs {needs}; write {order}"
    if slower < -_SAME and (other.settings.weights, other.settings.sharding) != (
        chosen.settings.weights,
        chosen.settings.sharding,
    ):
        return f"{-slower:.1%} less time, but more is elsewhere, which nothing needs to fit"
    if slower <= _SAME:
        return "as fast, and no simpler"
    return f"{slower:.1%} slower: {_cause(chosen, other)}"


def _cause(chosen: Prediction, other: Prediction) -> str:
    best, settings = chosen.settings, other.settings
    if sum(settings.recomputed) > sum(best.recomputed) and settings.chunks == best.chunks:
        return "more is recomputed"
    if other.bubble > chosen.bubble + _SAME:
        return f"bubble {other.bubble:.0%}, not {chosen.bubble:.0%}"
    if (settings.weights, settings.offload) != (best.weights, best.offload):
        return "the way from and to the host takes longer"
    if settings.sharding != best.sharding:
        return "the way from other replicas takes longer"
    if settings.stages < best.stages:
        return "fewer devices compute"
    if settings.order.split and not best.order.split:
        return "backwards in two parts take longer"
    return "smaller micro-batches take longer for each row"
