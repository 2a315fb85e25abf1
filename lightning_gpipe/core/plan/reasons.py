"""Why something else was not chosen."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from lightning_gpipe.core.plan.candidates import Candidate
from lightning_gpipe.core.plan.orders import Order
from lightning_gpipe.core.plan.prediction import Prediction


def reason(
    chosen: Prediction,
    other: Prediction,
    best: Candidate,
    candidate: Candidate,
    orders: Sequence[Order],
) -> str:
    """Why another candidate was not chosen.

    Args:
        chosen: What the best candidate takes.
        other: What the other one takes.
        best: The best candidate.
        candidate: The other one.
        orders: Those that were to be chosen from.
    """
    lacking = [(lack, j) for j, lack in enumerate(other.missing) if lack]
    if lacking:
        lack, j = max(lacking)
        return f"lacks {lack / 2**30:.3g} GiB on stage {j}"
    order = candidate.order
    slower = other.time / chosen.time - 1 if chosen.time else inf
    if slower < -_SAME and order not in orders:
        if order.by_micro_batch and not best.order.by_micro_batch:
            needs = "a loss for each micro-batch: training_step is called with each"
        else:
            needs = "to be asked for"
        return f"{-slower:.1%} less time, but needs {needs}; write {order}"
    if slower <= _SAME:
        return "as fast, and no simpler"
    return f"{slower:.1%} slower: {_why(chosen, other, best, candidate)}"


_SAME = 1e-6  # the share by which times differ that are the same


def _why(chosen: Prediction, other: Prediction, best: Candidate, candidate: Candidate) -> str:
    """Why another candidate takes longer."""
    if candidate.recomputed > best.recomputed and candidate.chunks == best.chunks:
        return "more is recomputed"
    if other.bubble > chosen.bubble + _SAME:
        return f"bubble {other.bubble:.0%}, not {chosen.bubble:.0%}"
    if candidate.stages < best.stages:
        return "fewer devices compute"
    if candidate.order.split and not best.order.split:
        return "backwards in two parts take longer"
    return "smaller micro-batches take longer for each row"
