"""Chunks, schedule, recomputation and balance that the planner chooses."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from lightning_gpipe.core.schedules import FILL_DRAIN, ScheduleKind

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
