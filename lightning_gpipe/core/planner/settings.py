"""The settings of a pipeline that a plan chooses, and the numbers that it tries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

from lightning_gpipe.core.schedules import (
    FILL_DRAIN,
    ActivationCheckpointing,
    ScheduleKind,
    count_recomputed,
)

_LISTED = 64  # stages whose layers a message lists


class PlannedSettings(NamedTuple):
    """The settings of a pipeline that a plan chooses; a candidate while it has no balance.

    Attributes:
        stages: The number of stages.
        chunks: The number of micro-batches.
        recomputed: An integer k: each stage recomputes the first k micro-batches.
        order: The schedule, with whole or with split backwards.
        balance: The number of layers in each stage; empty while it is not known.
    """

    stages: int
    chunks: int
    recomputed: int
    order: ScheduleKind = FILL_DRAIN
    balance: tuple[int, ...] = ()

    @property
    def activation_checkpointing(self) -> int | Literal["always", "except_last", "never"]:
        """The argument for the engine."""
        if self.recomputed == 0:
            return "never"
        return "always" if self.recomputed == self.chunks else self.recomputed

    def as_dict(self) -> dict[str, Any]:
        """Return the arguments as numbers, strings and lists, for JSON."""
        return {
            "balance": list(self.balance),
            "chunks": self.chunks,
            "activation_checkpointing": self.activation_checkpointing,
            "schedule": self.order.schedule,
            "split_backward": self.order.split,
        }

    def __str__(self) -> str:
        balance = str(list(self.balance))
        if len(self.balance) > _LISTED:
            balance = f"[{', '.join(map(str, self.balance[:3]))}, ... of {len(self.balance)}]"
        mode = f"activation_checkpointing={self.activation_checkpointing!r}"
        arguments = [f"balance={balance}", f"chunks={self.chunks}", mode, self.order.arguments]
        return ", ".join(filter(None, arguments))


def near(best: PlannedSettings, candidates: Sequence[PlannedSettings]) -> Iterator[PlannedSettings]:
    """Yield the candidates next to the best one in one thing, and those with no or all recomputed.

    All have the schedule of the best one.
    """
    n, m, k, order, _ = best
    candidates = [c for c in candidates if c.order == order]
    stages = sorted({c.stages for c in candidates if c.chunks == m})
    chunks = sorted({c.chunks for c in candidates if c.stages == n})
    recomputed = sorted({c.recomputed for c in candidates if c[:2] == (n, m)})
    for other in _beside(stages, n):
        yield PlannedSettings(other, m, k, order)
    for other in _beside(chunks, m):
        same = [c for c in candidates if c[:2] == (n, other)]
        yield min(same, key=lambda c: abs(c.recomputed / c.chunks - k / m))
    for other in sorted({recomputed[0], *_beside(recomputed, k), recomputed[-1]} - {k}):
        yield PlannedSettings(n, m, other, order)


def _beside(values: Sequence[int], value: int) -> list[int]:
    """The neighbours of a value."""
    k = values.index(value)
    return [*values[max(0, k - 1) : k], *values[k + 1 : k + 2]]


def fewer_stages(devices: int) -> list[int]:
    """The numbers of stages to try: all, or of many devices their halves."""
    if devices <= 16:
        return list(range(1, devices + 1))
    return sorted({max(1, devices >> shift) for shift in range(devices.bit_length())})


def doubled(least: int, most: int) -> list[int]:
    """Powers of two times ``least``, up to ``most``; at least one number."""
    return [least << shift for shift in range(max(1, (most // least).bit_length()))]


def numbers_recomputed(m: int, mode: ActivationCheckpointing | None) -> list[int]:
    """The numbers of micro-batches to recompute that are tried."""
    if mode is not None:
        return [count_recomputed(mode, m)]
    eighths = {round(m * eighth / 8) for eighth in range(9)}
    return sorted(eighths | {m - 1, m})
