"""1F1B: a backward as soon as its gradient comes, so that few micro-batches are alive at a time."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_gpipe.core.schedules.fill_drain import fill_drain_patterns
from lightning_gpipe.core.schedules.interleaved import check_groups, interleaved_patterns
from lightning_gpipe.core.schedules.patterns import Pattern
from lightning_gpipe.core.schedules.placement import check_looped


def one_forward_one_backward_patterns(
    m: int, placement: Sequence[int], *, recomputed: int = 0, split: bool = False
) -> list[Pattern]:
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
        patterns = fill_drain_patterns if m % workers else interleaved_patterns
        return patterns(m, placement, recomputed=recomputed, split=split)

    def pattern(j: int) -> Pattern:
        visits = [(i, j) for i in range(m)]
        return Pattern(visits, visits, n - 1 - j, recomputed, split)

    return list(map(pattern, range(n)))


def check_one_forward_one_backward(m: int, placement: Sequence[int]) -> None:
    """Refuse a placement that is not looped, and for interleaved stages incomplete groups."""
    check_looped("1f1b", placement)
    if 1 + max(placement) < len(placement):
        check_groups(m, 1 + max(placement))
