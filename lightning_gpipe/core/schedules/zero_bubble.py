"""Zero bubble: the gradients of the weights, which nobody waits for, fill the time of waiting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_gpipe.core.schedules.one_forward_one_backward import (
    one_forward_one_backward_patterns,
)
from lightning_gpipe.core.schedules.patterns import Pattern
from lightning_gpipe.core.schedules.placement import check_looped, counted


def zero_bubble_patterns(
    m: int, placement: Sequence[int], *, recomputed: int = 0, split: bool = True
) -> list[Pattern]:
    """Run 1F1B with split backwards, in which stage j is j micro-batches late with the weights.

    Later stages begin later, and have more time to fill at the end. Each stage holds the
    activations of at most n micro-batches. If F, B and W take equally long, the bubble is a third
    of that of 1F1B::

        stage 0 | F0 F1 F2 .  .  B0 W0 F3 B1 W1 B2 W2 B3 W3
        stage 1 | .  F0 F1 .  B0 F2 B1 W0 F3 B2 W1 B3 W2 W3
        stage 2 | .  .  F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3

    Source: Qi et al., "Zero Bubble Pipeline Parallelism" (2023), where it is called ZB-H1.
    """
    patterns = one_forward_one_backward_patterns(m, placement, recomputed=recomputed, split=True)
    return [replace(pattern, late=j) for j, pattern in enumerate(patterns)]


def check_zero_bubble(m: int, placement: Sequence[int]) -> None:
    """Refuse a placement in which a worker has several stages."""
    check_looped("zero_bubble", placement)
    n, workers = len(placement), 1 + max(placement)
    if workers < n:
        raise ValueError(
            f"schedule='zero_bubble' needs a device for each stage: got {counted(n, 'stage')} on "
            f"{counted(workers, 'device')}. Use a balance of {counted(workers, 'stage')}, or write "
            "schedule='1f1b', which interleaves the stages of a device."
        )
