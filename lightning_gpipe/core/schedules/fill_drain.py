"""GPipe's order: all forwards, then all backwards reversed."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_gpipe.core.schedules.patterns import Pattern


def fill_drain_patterns(
    m: int, placement: Sequence[int], *, recomputed: int = 0, split: bool = False
) -> list[Pattern]:
    """Fill the pipeline with all micro-batches, and drain it in reverse.

    Micro-batch i meets stage j at clock k = i + j while the pipeline fills. With fewer workers than
    stages a worker takes all micro-batches through its first stage, then through its next, so that
    a device with v stages waits no longer than a device with one::

        stage 0 (worker 0) | F0 F1 .  .  .
        stage 1 (worker 1) | .  F0 F1 .  .
        stage 2 (worker 0) | .  .  F0 F1 .
        stage 3 (worker 1) | .  .  .  F0 F1

    A recomputation needs no gradient, and so fills the wait for one. Where backwards are split, the
    gradients of the weights come right after, so that the stage before waits for less.

    Source: Huang et al., "GPipe" (2019), for fill-drain; Lamy-Poirier, "Breadth-First Pipeline
    Parallelism" (2022), for the looped form.
    """

    def pattern(worker: int) -> Pattern:
        stages = [j for j, owner in enumerate(placement) if owner == worker]
        forwards = [(i, j) for j in stages for i in range(m)]
        return Pattern(forwards, forwards[::-1], len(forwards), recomputed, split)

    return list(map(pattern, range(max(placement) + 1)))
