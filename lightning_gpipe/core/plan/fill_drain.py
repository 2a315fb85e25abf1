"""GPipe's order: all forwards, then all backwards reversed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

from lightning_gpipe.core.plan.action import Action, Kind
from lightning_gpipe.core.plan.rows import Backwards
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

    def forward(stages: Sequence[int]) -> Iterator[Action]:
        for j in stages:
            for i in range(m):
                yield Action(Kind.FORWARD, i, j)

    def backward(stages: Sequence[int]) -> Iterator[Action]:
        for j in reversed(stages):
            for i in reversed(range(m)):
                yield from parts.of(i, j)

    parts = Backwards(recomputed, split)
    own = [
        [j for j, worker in enumerate(placement) if worker == w] for w in range(max(placement) + 1)
    ]
    phases = (
        tuple(tuple(forward(stages)) for stages in own),
        tuple(tuple(backward(stages)) for stages in own),
    )
    return Schedule(m, placement, phases)
