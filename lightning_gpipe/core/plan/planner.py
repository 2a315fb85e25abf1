"""Chooses the stages, the balance, the micro-batches and the recomputation of a pipeline.

What is fastest depends on all of them at once: more micro-batches make the bubble smaller and each
of them less efficient, recomputation makes room and takes time, more stages make the bubble larger.
So all combinations are candidates, and the least predicted time wins of those that fit the memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from lightning_gpipe.core.plan.balance.costs import Place
from lightning_gpipe.core.plan.candidates import Asked, Candidate, near
from lightning_gpipe.core.plan.layout import Around
from lightning_gpipe.core.plan.measured import ModelProfile
from lightning_gpipe.core.plan.no_plan import NoPlan, that_fits
from lightning_gpipe.core.plan.prediction import Prediction, Settings
from lightning_gpipe.core.plan.recompute import ActivationCheckpointing
from lightning_gpipe.core.plan.search import Search


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
    )
    if asked.stages is not None and not 1 <= asked.stages <= len(places):
        raise ValueError(
            f"a plan has a device for each stage: got {asked.stages} stages and {len(places)} "
            "devices. Give as many devices as stages."
        )
    search, candidates = Search(asked), asked.candidates()
    best = search.fastest(candidates)
    if best is None:
        raise NoPlan(search.nearest(candidates), that_fits(asked))
    chosen = search.predicted(best)
    others = [
        Alternative(other, _reason(chosen, other, best, each))
        for each in near(best, candidates)
        if each != best
        for other in [search.predicted(each)]
    ]
    return Plan(chosen, tuple(others))


def _reason(chosen: Prediction, other: Prediction, best: Candidate, candidate: Candidate) -> str:
    """Why another candidate was not chosen."""
    lacking = [(lack, j) for j, lack in enumerate(other.missing) if lack]
    if lacking:
        lack, j = max(lacking)
        return f"lacks {lack / 2**30:.3g} GiB on stage {j}"
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
