"""The schedules in which each micro-batch has a loss of its own, by the names that users write."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Literal, get_args

from lightning_gpipe.core.plan.caller_row import with_caller
from lightning_gpipe.core.plan.fill_drain import fill_drain
from lightning_gpipe.core.plan.interleaved import check_groups, interleaved
from lightning_gpipe.core.plan.layout import folded, looped
from lightning_gpipe.core.plan.one_forward_one_backward import one_forward_one_backward
from lightning_gpipe.core.plan.schedule import Schedule
from lightning_gpipe.core.plan.zero_bubble import zero_bubble
from lightning_gpipe.core.plan.zero_bubble_v import zero_bubble_v

ByMicroBatch = Literal["1f1b", "zero_bubble", "zero_bubble_v"]


def check_by_micro_batch(name: str, chunks: int, placement: tuple[int, ...]) -> None:
    """Refuse a schedule that cannot be, for the settings of a pipeline.

    Args:
        name: The schedule's.
        chunks: The number of micro-batches of a full mini-batch.
        placement: The worker of each stage.

    Raises:
        ValueError: If there is no such schedule, or none for this placement or number.
    """
    if name not in get_args(ByMicroBatch):
        choices = ", ".join(map(repr, get_args(ByMicroBatch)))
        raise ValueError(f"schedule must be one of {choices}: got {name!r}.")
    n, workers = len(placement), 1 + max(placement)
    if name == "zero_bubble_v":
        _check_folded(placement)
        return
    if placement != looped(n, workers):
        raise ValueError(
            f"schedule={name!r} needs stage j on device j mod {workers}: got the stages on devices "
            f"{list(placement)}. schedule='fill_drain' works with any."
        )
    if workers == n:
        return
    if name == "zero_bubble":
        raise ValueError(
            "schedule='zero_bubble' needs a device for each stage: got "
            f"{n} stages on {workers} devices. Use a balance of {workers} stages, or write "
            "schedule='1f1b', which interleaves the stages of a device."
        )
    check_groups(chunks, workers)


@lru_cache(maxsize=256)
def by_micro_batch(
    name: ByMicroBatch,
    m: int,
    placement: tuple[int, ...],
    *,
    recomputed: int = 0,
    split: bool = False,
) -> Schedule:
    """The schedule of one mini-batch; with several stages on a device 1F1B is interleaved.

    A mini-batch with too few rows has fewer micro-batches than others. If these make no whole
    groups for an interleaved schedule, all their forwards come before their backwards.

    Args:
        name: The schedule's; what :func:`check_by_micro_batch` has not refused.
        m: The number of micro-batches.
        placement: The worker of each stage.
        recomputed: An integer k: the first k micro-batches drop their activations.
        split: Whether the gradients of the weights are an action of their own; they always are in
            ``"zero_bubble"`` and ``"zero_bubble_v"``.
    """
    n, workers = len(placement), 1 + max(placement)
    if name == "zero_bubble":
        return zero_bubble(m, n, recomputed=recomputed)
    if name == "zero_bubble_v":
        return zero_bubble_v(m, workers, recomputed=recomputed)
    if workers == n:
        return one_forward_one_backward(m, n, recomputed=recomputed, split=split)
    if m % workers == 0:
        return interleaved(m, n, workers, recomputed=recomputed, split=split)
    return _at_once(fill_drain(m, placement, recomputed=recomputed, split=split))


def remade(schedule: Schedule, m: int, *, recomputed: int) -> Schedule:
    """The schedule of the same name, placement and split with other numbers.

    Args:
        schedule: One of those here, or fill-drain.
        m: The number of micro-batches.
        recomputed: An integer k: the first k micro-batches drop their activations.
    """
    placement, split = schedule.placement, schedule.split
    if not schedule.caller:
        return fill_drain(m, placement, recomputed=recomputed, split=split)

    def named(name: ByMicroBatch, m: int, recomputed: int) -> Schedule:
        return by_micro_batch(name, m, placement, recomputed=recomputed, split=split)

    before = schedule.m, len(schedule.recomputed(0))
    name = next(each for each in get_args(ByMicroBatch) if named(each, *before) == schedule)
    return named(name, m, recomputed)


def _check_folded(placement: tuple[int, ...]) -> None:
    n, workers = len(placement), 1 + max(placement)
    if placement != folded(n, workers):
        raise ValueError(
            "schedule='zero_bubble_v' needs the stages on the devices in order, and back: got "
            f"the stages on devices {list(placement)}. Write GPipe(..., folded=True)."
        )


def _at_once(schedule: Schedule) -> Schedule:
    """The schedule in one phase: it waits for the loss of each micro-batch, not for that of all."""
    return with_caller(replace(schedule, phases=(schedule.rows,)))
