"""The rows of workers in brief, from which their actions follow.

The rows of most schedules are of one form: some forwards, then a backward after each further
forward, and the rest of the backwards. They differ in the order in which micro-batches and stages
are visited, in how many forwards come first, and in when the gradients of the weights follow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lightning_gpipe.core.schedules.action import Action, Kind
from lightning_gpipe.core.schedules.placement import check_looped, counted

Visits = NDArray[np.int64]  # of shape (visits, 2): the micro-batch and the stage of each


@dataclass(frozen=True)
class Pattern:
    """The row of one worker in brief."""

    forwards: Visits
    backwards: Visits
    warm_up: int  # the forwards before the first backward
    late: int = 0  # further backwards before the gradients of the weights, where they are split

    def actions(self, recomputed: Sequence[int], *, split: bool) -> Iterator[Action]:
        """Yield the actions; stage j recomputes its first ``recomputed[j]`` micro-batches."""
        forwards, backwards = self.forwards.tolist(), self.backwards.tolist()
        for i, j in forwards[: self.warm_up]:
            yield Action(Kind.FORWARD, i, j)
        for k, (i, j) in enumerate(backwards):
            for forward in forwards[self.warm_up + k : self.warm_up + k + 1]:
                yield Action(Kind.FORWARD, *forward)
            if i < recomputed[j]:
                yield Action(Kind.RECOMPUTE, i, j)
            yield Action(Kind.BACKWARD, i, j)
            if split and k >= self.late:
                yield Action(Kind.WEIGHTS, *backwards[k - self.late])
        if split:
            for visit in backwards[max(0, len(backwards) - self.late) :]:
                yield Action(Kind.WEIGHTS, *visit)


def fill_drain_patterns(m: int, placement: Sequence[int]) -> list[Pattern]:
    """Fill the pipeline with all micro-batches, and drain it in reverse: GPipe's order.

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
        forwards = _visits(np.arange(m), np.array(stages)[:, None])
        return Pattern(forwards, forwards[::-1], len(forwards))

    return list(map(pattern, range(max(placement) + 1)))


def one_forward_one_backward_patterns(m: int, placement: Sequence[int]) -> list[Pattern]:
    """Run a backward after each forward, once the first micro-batch has reached the last stage.

    Stage j of n holds the activations of at most n - j micro-batches, whatever m is. The bubble is
    that of fill-drain. Each micro-batch has a loss of its own::

        stage 0 | F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
        stage 1 | .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .
        stage 2 | .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .

    Several stages of one worker are interleaved. Where a short mini-batch makes no whole groups for
    that, all its forwards come before its backwards.

    Source: Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training" (2019);
    with the flush between mini-batches, "Memory-Efficient Pipeline-Parallel DNN Training" (2021).
    """
    n, workers = len(placement), 1 + max(placement)
    if workers < n:
        return (fill_drain_patterns if m % workers else _interleaved)(m, placement)

    def pattern(j: int) -> Pattern:
        visits = _visits(np.arange(m), j)
        return Pattern(visits, visits, n - 1 - j)

    return list(map(pattern, range(n)))


def _interleaved(m: int, placement: Sequence[int]) -> list[Pattern]:
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
    loops = np.arange(len(placement) // workers)
    groups = np.arange(m).reshape(-1, 1, workers)

    def visits(worker: int, loops: NDArray[np.int64]) -> Visits:
        return _visits(groups, loops[:, None] * workers + worker)

    def pattern(worker: int) -> Pattern:
        # While the first backward comes back, as many forwards go on as on the way to the end.
        warm_up = 2 * (workers - 1 - worker) + (len(loops) - 1) * workers
        return Pattern(visits(worker, loops), visits(worker, loops[::-1]), warm_up)

    return list(map(pattern, range(workers)))


def _visits(i: NDArray[np.int64], j: NDArray[np.int64] | int) -> Visits:
    """Return the visits of these micro-batches and stages, broadcast, in the order of the axes."""
    return np.stack(np.broadcast_arrays(i, j), axis=-1).reshape(-1, 2)


def check_one_forward_one_backward(m: int, placement: Sequence[int]) -> None:
    """Refuse a placement that is not looped, and for interleaved stages incomplete groups."""
    check_looped("1f1b", placement)
    workers = 1 + max(placement)
    if workers < len(placement) and m % workers:  # a gap in the last group would be a deadlock
        fewer, more = m // workers * workers, -(-m // workers) * workers
        choice = f"chunks={fewer} or chunks={more}" if fewer else f"chunks={more}"
        raise ValueError(
            "interleaved stages need a number of micro-batches that is a multiple of the number of "
            f"devices: got {m} micro-batches on {workers} devices. Write {choice}, or give each "
            "device one stage."
        )


def zero_bubble_patterns(m: int, placement: Sequence[int]) -> list[Pattern]:
    """Run 1F1B with split backwards, in which stage j is j micro-batches late with the weights.

    Nobody waits for the gradients of the weights, so they fill the time of waiting: later stages
    begin later, and have more time to fill at the end. Each stage holds the activations of at most
    n micro-batches. If F, B and W take equally long, the bubble is a third of that of 1F1B::

        stage 0 | F0 F1 F2 .  .  B0 W0 F3 B1 W1 B2 W2 B3 W3
        stage 1 | .  F0 F1 .  B0 F2 B1 W0 F3 B2 W1 B3 W2 W3
        stage 2 | .  .  F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3

    Source: Qi et al., "Zero Bubble Pipeline Parallelism" (2023), where it is called ZB-H1.
    """
    patterns = one_forward_one_backward_patterns(m, placement)
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
