"""The reasons why an alternative was not chosen."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from lightning_gpipe.core.planner.prediction import Prediction
from lightning_gpipe.core.schedules import ScheduleKind

_SAME = 1e-6  # the relative difference up to which times are the same


def reason(chosen: Prediction, other: Prediction, orders: Sequence[ScheduleKind]) -> str:
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
    if slower <= _SAME:
        return "as fast, and no simpler"
    return f"{slower:.1%} slower: {_cause(chosen, other)}"


def _cause(chosen: Prediction, other: Prediction) -> str:
    """The cause of a longer time."""
    best, settings = chosen.settings, other.settings
    if settings.recomputed > best.recomputed and settings.chunks == best.chunks:
        return "more is recomputed"
    if other.bubble > chosen.bubble + _SAME:
        return f"bubble {other.bubble:.0%}, not {chosen.bubble:.0%}"
    if settings.stages < best.stages:
        return "fewer devices compute"
    if settings.order.split and not best.order.split:
        return "backwards in two parts take longer"
    return "smaller micro-batches take longer for each row"
