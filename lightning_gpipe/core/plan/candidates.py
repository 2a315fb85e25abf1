"""What a plan may choose from: combinations of stages, micro-batches, recomputation and order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_gpipe.core.plan.balance.costs import Place
from lightning_gpipe.core.plan.layout import Around
from lightning_gpipe.core.plan.measured import ModelProfile
from lightning_gpipe.core.plan.orders import FILL_DRAIN, Order
from lightning_gpipe.core.plan.recompute import ActivationCheckpointing, count_recomputed


class Candidate(NamedTuple):
    """A combination that is not balanced yet.

    Attributes:
        stages: The number of stages.
        chunks: The number of micro-batches.
        recomputed: How many of them each stage recomputes.
        order: The order of the actions.
    """

    stages: int
    chunks: int
    recomputed: int
    order: Order = FILL_DRAIN

    def __str__(self) -> str:
        found = f"{self.stages} stages, chunks={self.chunks}, {self.recomputed} recomputed"
        return ", ".join([found, *([self.order.written] if self.order.written else [])])


@dataclass(frozen=True)
class Asked:
    """What is given of a plan.

    Attributes:
        profiles, places, rows, stages, balance, chunks, most, activation_checkpointing, around: As
            for :func:`~lightning_gpipe.core.plan.planner.plan_for`.
        orders: Those to choose from, the simplest first.
    """

    profiles: tuple[ModelProfile, ...]
    places: tuple[Place, ...]
    rows: int
    stages: int | None = None
    balance: tuple[int, ...] | None = None
    chunks: int | None = None
    most: int | None = None
    activation_checkpointing: ActivationCheckpointing | None = None
    around: Around = "last"
    orders: tuple[Order, ...] = (FILL_DRAIN,)

    def known(self, order: Order) -> bool:
        """Whether it is known what its actions take."""
        return not order.split or all(each.split for each in self.profiles)

    @property
    def layers(self) -> int:
        """The number of layers."""
        return len(self.profiles[0].layers)

    def candidates(self) -> list[Candidate]:
        """All combinations of what is not given."""
        numbers = [self.stages] if self.stages else _fewer(min(len(self.places), self.layers))
        return [
            Candidate(n, m, k, order)
            for order in self.orders
            for n in numbers
            for m in self.numbers_of_micro_batches(n, order)
            for k in _shares(m, self.activation_checkpointing)
        ]

    def numbers_of_micro_batches(self, stages: int, order: Order) -> list[int]:
        """Those that are tried, the least first."""
        devices = min(stages, len(self.places))
        # Interleaved stages need whole groups.
        group = devices if order.schedule == "1f1b" and devices < stages else 1
        tried = [self.chunks] if self.chunks else _doubled(group, self.most or self.rows)
        return sorted({min(each, self.rows) for each in tried})


def near(best: Candidate, candidates: Sequence[Candidate]) -> Iterator[Candidate]:
    """Those that differ from the best one in one thing, next to it; and no or all recomputed.

    Those of other orders are not among them.
    """
    n, m, k, order = best
    candidates = [each for each in candidates if each.order == order]
    share = k / m
    stages = sorted({each.stages for each in candidates if each.chunks == m})
    chunks = sorted({each.chunks for each in candidates if each.stages == n})
    recomputed = sorted({each.recomputed for each in candidates if each[:2] == (n, m)})
    for other in _beside(stages, n):
        yield Candidate(other, m, k, order)
    for other in _beside(chunks, m):
        yield _nearest(share, [each for each in candidates if each[:2] == (n, other)])
    for other in sorted({recomputed[0], *_beside(recomputed, k), recomputed[-1]}):
        yield Candidate(n, m, other, order)


def _beside(values: Sequence[int], value: int) -> list[int]:
    """What is next to a value, on either side."""
    k = values.index(value)
    return [*values[max(0, k - 1) : k], *values[k + 1 : k + 2]]


def _nearest(share: float, candidates: Sequence[Candidate]) -> Candidate:
    return min(candidates, key=lambda each: abs(each.recomputed / each.chunks - share))


def _fewer(devices: int) -> list[int]:
    """The numbers of stages to try: all, or of many devices their halves."""
    if devices <= 16:
        return list(range(1, devices + 1))
    return sorted({max(1, devices >> shift) for shift in range(devices.bit_length())})


def _doubled(least: int, most: int) -> list[int]:
    """Powers of two, up to so many; or multiples of them, and at least one."""
    return [least << shift for shift in range(max(1, (most // least).bit_length()))]


def _shares(m: int, mode: ActivationCheckpointing | None) -> list[int]:
    """The numbers of micro-batches to recompute that are tried."""
    if mode is not None:
        return [count_recomputed(mode, m)]
    eighths = {round(m * eighth / 8) for eighth in range(9)}
    return sorted(eighths | {m - 1, m})
