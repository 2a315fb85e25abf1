"""1F1B: a backward as soon as there is one, so that few micro-batches are alive at a time."""

from __future__ import annotations

from functools import lru_cache

from lightning_gpipe.core.plan.caller_row import with_caller
from lightning_gpipe.core.plan.rows import Pattern
from lightning_gpipe.core.plan.schedule import Schedule


@lru_cache(maxsize=256)
def one_forward_one_backward(
    m: int, n: int, *, recomputed: int = 0, split: bool = False
) -> Schedule:
    """Run a backward after each forward, once the first micro-batch has reached the last stage.

    Stage j of n holds the activations of at most n - j micro-batches, whatever m is. The bubble is
    that of fill-drain. Each micro-batch has a loss of its own::

        stage 0 | F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
        stage 1 | .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .
        stage 2 | .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .

    Args:
        m: The number of micro-batches.
        n: The number of stages, each with a worker of its own.
        recomputed: An integer k: the first k micro-batches drop their activations.
        split: Whether the gradients of the weights are an action of their own, right after the
            backward: what waits for the backward waits for less.

    Source: Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training" (2019);
    with the flush between mini-batches, "Memory-Efficient Pipeline-Parallel DNN Training" (2021).
    """
    patterns = one_forward_one_backward_patterns(m, n, recomputed=recomputed, split=split)
    rows = tuple(tuple(pattern.actions()) for pattern in patterns)
    return with_caller(Schedule(m, tuple(range(n)), (rows,)))


def one_forward_one_backward_patterns(
    m: int, n: int, *, recomputed: int = 0, split: bool = False
) -> list[Pattern]:
    """The row of each worker in brief; arguments as for :func:`one_forward_one_backward`."""

    def pattern(j: int) -> Pattern:
        own = [(i, j) for i in range(m)]
        return Pattern(own, own, n - 1 - j, recomputed, split)

    return list(map(pattern, range(n)))
