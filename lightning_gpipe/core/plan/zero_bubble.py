"""Zero bubble: the gradients of the weights, which nobody waits for, fill the time of waiting."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from lightning_gpipe.core.plan.caller_row import with_caller
from lightning_gpipe.core.plan.one_forward_one_backward import one_forward_one_backward_patterns
from lightning_gpipe.core.plan.rows import Pattern
from lightning_gpipe.core.plan.schedule import Schedule


@lru_cache(maxsize=256)
def zero_bubble(m: int, n: int, *, recomputed: int = 0) -> Schedule:
    """Run 1F1B with split backwards, in which stage j is j micro-batches late with the weights.

    Later stages begin later, and have more time to fill at the end. Each stage holds the
    activations of at most n micro-batches. If F, B and W take equally long, the bubble is a third
    of that of 1F1B::

        stage 0 | F0 F1 F2 .  .  B0 W0 F3 B1 W1 B2 W2 B3 W3
        stage 1 | .  F0 F1 .  B0 F2 B1 W0 F3 B2 W1 B3 W2 W3
        stage 2 | .  .  F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3

    Args:
        m: The number of micro-batches.
        n: The number of stages, each with a worker of its own.
        recomputed: An integer k: the first k micro-batches drop their activations.

    Source: Qi et al., "Zero Bubble Pipeline Parallelism" (2023), where it is called ZB-H1.
    """
    patterns = zero_bubble_patterns(m, n, recomputed=recomputed)
    rows = tuple(tuple(pattern.actions()) for pattern in patterns)
    return with_caller(Schedule(m, tuple(range(n)), (rows,)))


def zero_bubble_patterns(m: int, n: int, *, recomputed: int = 0) -> list[Pattern]:
    """The row of each worker in brief; arguments as for :func:`zero_bubble`."""
    patterns = one_forward_one_backward_patterns(m, n, recomputed=recomputed, split=True)
    return [replace(pattern, late=j) for j, pattern in enumerate(patterns)]
