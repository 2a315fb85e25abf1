"""1F1B for workers with several stages each: the bubble gets shorter, as with looped fill-drain."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from lightning_gpipe.core.plan.caller_row import with_caller
from lightning_gpipe.core.plan.layout import looped
from lightning_gpipe.core.plan.rows import Pattern, Visit
from lightning_gpipe.core.plan.schedule import Schedule


@lru_cache(maxsize=256)
def interleaved(
    m: int, n: int, workers: int, *, recomputed: int = 0, split: bool = False
) -> Schedule:
    """Run 1F1B where each of d workers has several stages: stage j is on worker j mod d.

    Groups of d micro-batches go through each of a worker's stages in turn, so that
    a group comes back to the first worker when that has just sent away its last one::

        stage 0 (worker 0) | F0 F1 .  .  F2 .  F3 .  .  B0 .  B1 .  .  .  .  B2 B3
        stage 1 (worker 1) | .  F0 F1 .  .  .  .  F2 B0 F3 B1 .  .  .  .  B2 B3 .
        stage 2 (worker 0) | .  .  F0 F1 .  B0 .  B1 F2 .  F3 .  .  B2 .  B3 .  .
        stage 3 (worker 1) | .  .  .  F0 B0 F1 B1 .  .  .  .  F2 B2 F3 B3 .  .  .

    Args:
        m: The number of micro-batches.
        n: The number of stages.
        workers: The number of workers; n is a multiple of it.
        recomputed: An integer k: the first k micro-batches drop their activations.
        split: Whether the gradients of the weights are an action of their own.

    Raises:
        ValueError: If m is not a multiple of the number of workers: the last group would have gaps,
            and the workers would wait for each other.

    Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
    Megatron-LM" (2021).
    """
    patterns = interleaved_patterns(m, n, workers, recomputed=recomputed, split=split)
    rows = tuple(tuple(pattern.actions()) for pattern in patterns)
    return with_caller(Schedule(m, looped(n, workers), (rows,)))


def interleaved_patterns(
    m: int, n: int, workers: int, *, recomputed: int = 0, split: bool = False
) -> list[Pattern]:
    """The row of each worker in brief; arguments and errors as for :func:`interleaved`."""
    check_groups(m, workers)
    loops = range(n // workers)

    def visits(worker: int, loops: Sequence[int]) -> list[Visit]:
        """The micro-batches and stages that a worker goes through, in order."""
        return [
            (i, loop * workers + worker)
            for first in range(0, m, workers)
            for loop in loops
            for i in range(first, first + workers)
        ]

    def pattern(worker: int) -> Pattern:
        # While the first backward comes back, as many forwards go on as on the way to the end.
        warm_up = 2 * (workers - 1 - worker) + (len(loops) - 1) * workers
        there, back = visits(worker, loops), visits(worker, loops[::-1])
        return Pattern(there, back, warm_up, recomputed, split)

    return list(map(pattern, range(workers)))


def check_groups(m: int, workers: int) -> None:
    """Refuse a number of micro-batches that makes no whole groups.

    Raises:
        ValueError: Says which numbers would.
    """
    if m % workers:
        fewer, more = m // workers * workers, -(-m // workers) * workers
        choice = f"chunks={fewer} or chunks={more}" if fewer else f"chunks={more}"
        raise ValueError(
            "interleaved stages need a number of micro-batches that is a multiple of the number of "
            f"devices: got {m} micro-batches on {workers} devices. Write {choice}, or give each "
            "device one stage."
        )
