"""1F1B for workers with several stages each: the bubble gets shorter, as with looped fill-drain."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_gpipe.core.schedules.patterns import Pattern, Visit


def interleaved_patterns(
    m: int, placement: Sequence[int], *, recomputed: int = 0, split: bool = False
) -> list[Pattern]:
    """Run 1F1B where each of d workers has several stages: stage j is on worker j mod d.

    Groups of d micro-batches go through each of a worker's stages in turn, so that a group comes
    back to the first worker when that has just sent away its last one::

        stage 0 (worker 0) | F0 F1 .  .  F2 .  F3 .  .  B0 .  B1 .  .  .  .  B2 B3
        stage 1 (worker 1) | .  F0 F1 .  .  .  .  F2 B0 F3 B1 .  .  .  .  B2 B3 .
        stage 2 (worker 0) | .  .  F0 F1 .  B0 .  B1 F2 .  F3 .  .  B2 .  B3 .  .
        stage 3 (worker 1) | .  .  .  F0 B0 F1 B1 .  .  .  .  F2 B2 F3 B3 .  .  .

    Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
    Megatron-LM" (2021).
    """
    workers = 1 + max(placement)
    loops = range(len(placement) // workers)

    def visits(worker: int, loops: Sequence[int]) -> list[Visit]:
        return [
            (i, loop * workers + worker)
            for first in range(0, m, workers)
            for loop in loops
            for i in range(first, first + workers)
        ]

    def pattern(worker: int) -> Pattern:
        # While the first backward comes back, as many forwards go on as on the way to the end.
        warm_up = 2 * (workers - 1 - worker) + (len(loops) - 1) * workers
        forwards, backwards = visits(worker, loops), visits(worker, loops[::-1])
        return Pattern(forwards, backwards, warm_up, recomputed, split)

    return list(map(pattern, range(workers)))


def check_groups(m: int, workers: int) -> None:
    """Refuse a number of micro-batches that makes no whole groups."""
    if m % workers:  # the last group would have gaps, and the workers would deadlock
        fewer, more = m // workers * workers, -(-m // workers) * workers
        choice = f"chunks={fewer} or chunks={more}" if fewer else f"chunks={more}"
        raise ValueError(
            "interleaved stages need a number of micro-batches that is a multiple of the number of "
            f"devices: got {m} micro-batches on {workers} devices. Write {choice}, or give each "
            "device one stage."
        )
