"""Chooses stages, balance, schedule, micro-batches and recomputation of a pipeline.

What is fastest depends on all of them at once: more micro-batches make the bubble smaller and each
of them less efficient, recomputation makes room and takes time, more stages make the bubble larger.
So all combinations are candidates, and the least predicted time wins of those that fit the memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from lightning_gpipe.core.plan.balance.costs import Place
from lightning_gpipe.core.plan.by_micro_batch import check_by_micro_batch
from lightning_gpipe.core.plan.candidates import Asked, Candidate, near
from lightning_gpipe.core.plan.layout import Around, check_even, looped
from lightning_gpipe.core.plan.measured import ModelProfile
from lightning_gpipe.core.plan.no_plan import NoPlan, that_fits
from lightning_gpipe.core.plan.orders import ORDERS, ScheduleName, orders_for
from lightning_gpipe.core.plan.prediction import Prediction
from lightning_gpipe.core.plan.reasons import reason
from lightning_gpipe.core.plan.recompute import ActivationCheckpointing
from lightning_gpipe.core.plan.search import Search
from lightning_gpipe.core.plan.settings import Settings


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
    schedule: ScheduleName | Literal["auto"] = "fill_drain",
    split_backward: bool | None = False,
    around: Around = "last",
) -> Plan:
    """The plan with the least predicted time of those that fit the devices.

    Args:
        profiles: What the layers cost; of several, which were measured with micro-batches of
            different sizes, the one with the nearest number of rows counts.
        places: The devices: their speeds and memory.
        rows: The number of rows of a mini-batch; None takes what was measured.
        stages: Their number; None takes up to one per device.
        balance: The number of layers in each stage, with one or several stages on each device; None
            finds the best one.
        chunks: The number of micro-batches; None tries the powers of two.
        most: The most micro-batches to try; None tries as many as there are rows.
        activation_checkpointing: Which of them are recomputed; None finds as few as fit.
        schedule: What runs when; ``"auto"`` chooses also among schedules in which each micro-batch
            has a loss of its own. Others are among the alternatives.
        split_backward: Whether backwards are split; None chooses. What was not measured with
            backwards in two parts is not split.
        around: Which stage what is around the layers is with.

    Raises:
        ValueError: If there is nothing to choose from.
        NoPlan: If nothing fits.
    """
    found = (profiles,) if isinstance(profiles, ModelProfile) else tuple(profiles)
    asked = Asked(
        found,
        tuple(places),
        rows or found[0].rows * found[0].chunks,
        stages if balance is None else len(balance),
        None if balance is None else tuple(balance),
        chunks,
        most,
        activation_checkpointing,
        around,
        orders_for(schedule, split_backward),
    )
    if split_backward is None or schedule == "auto":
        asked = replace(asked, orders=tuple(filter(asked.known, asked.orders)))
    _check(asked)
    search, candidates = Search(asked), asked.candidates()
    best = search.fastest(candidates)
    if best is None:
        raise NoPlan(search.nearest(candidates), that_fits(asked))
    chosen = search.predicted(best)
    beside = [each for each in near(best, candidates) if each != best]
    beside += _in_other_orders(search, asked, best)
    others = [(each, search.predicted(each)) for each in beside]
    reasons = [reason(chosen, other, best, each, asked.orders) for each, other in others]
    alternatives = zip((other for _, other in others), reasons, strict=True)
    return Plan(chosen, tuple(Alternative(*each) for each in alternatives))


def _check(asked: Asked) -> None:
    """Refuse numbers of stages that devices cannot have.

    Raises:
        ValueError: Says what could be.
    """
    stages, devices = asked.stages, len(asked.places)
    if stages is None or 1 <= stages <= devices:
        return
    if asked.balance is None:
        raise ValueError(
            f"a plan has a device for each stage: got {stages} stages and {devices} devices. Give "
            "as many devices as stages, or a balance."
        )
    check_even(stages, devices, "Use a number of devices that divides the number of stages.")
    for order in asked.orders:
        if order.by_micro_batch:
            m = asked.numbers_of_micro_batches(stages, order)[0]
            check_by_micro_batch(order.schedule, m, looped(stages, devices))


def _in_other_orders(search: Search, asked: Asked, best: Candidate) -> list[Candidate]:
    """The fastest candidate of each other order, with as many stages and micro-batches."""
    found = []
    placement = looped(best.stages, min(best.stages, len(asked.places)))
    for order in ORDERS:
        possible = asked.known(order) and order.possible(best.chunks, placement)
        if order == best.order or not possible:
            continue
        same = replace(asked, stages=best.stages, chunks=best.chunks, orders=(order,)).candidates()
        found.append(search.fastest(same) or same[-1])
    return found
