"""GPipe's order: all forwards, then all backwards reversed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from lightning_gpipe.core.plan.rows import Pattern
from lightning_gpipe.core.plan.schedule import Schedule


@lru_cache(maxsize=256)
def fill_drain(
    m: int, placement: tuple[int, ...], *, recomputed: int = 0, split: bool = False
) -> Schedule:
    """Fill the pipeline with all micro-batches, and drain it in reverse.

    Micro-batch i meets stage j at clock k = i + j while the pipeline fills. With fewer workers than
    stages a worker takes all micro-batches through its first stage, then through its next, so that
    a device with v stages waits no longer than a device with one::

        stage 0 (worker 0) | F0 F1 .  .  .
        stage 1 (worker 1) | .  F0 F1 .  .
        stage 2 (worker 0) | .  .  F0 F1 .
        stage 3 (worker 1) | .  .  .  F0 F1

    Args:
        m: The number of micro-batches.
        placement: The worker of each stage.
        recomputed: An integer k: the first k micro-batches drop their activations; each of their
            backwards is preceded by a recompute, which needs no gradient and so fills the wait for
            one.
        split: Whether the gradients of the weights are an action of their own, right after the
            backward: the stage before waits for less.

    Source: Huang et al., "GPipe" (2019), for fill-drain; Lamy-Poirier, "Breadth-First Pipeline
    Parallelism" (2022), for the looped form.
    """
    patterns = fill_drain_patterns(m, placement, recomputed=recomputed, split=split)
    rows = [tuple(pattern.actions()) for pattern in patterns]
    ends = [len(pattern.forwards) for pattern in patterns]
    phases = (
        tuple(row[:end] for row, end in zip(rows, ends, strict=True)),
        tuple(row[end:] for row, end in zip(rows, ends, strict=True)),
    )
    return Schedule(m, placement, phases)


def fill_drain_patterns(
    m: int, placement: Sequence[int], *, recomputed: int = 0, split: bool = False
) -> list[Pattern]:
    """The row of each worker in brief; arguments as for :func:`fill_drain`."""

    def pattern(worker: int) -> Pattern:
        stages = [j for j, owner in enumerate(placement) if owner == worker]
        forwards = [(i, j) for j in stages for i in range(m)]
        return Pattern(forwards, forwards[::-1], len(forwards), recomputed, split)

    return list(map(pattern, range(max(placement) + 1)))
