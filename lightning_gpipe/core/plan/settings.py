"""What is decided about a pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from lightning_gpipe.core.plan.orders import FILL_DRAIN, Order

_LISTED = 64  # stages whose layers a message lists


@dataclass(frozen=True)
class Settings:
    """What is decided about a pipeline.

    Attributes:
        balance: The number of layers in each stage.
        chunks: The number of micro-batches.
        recomputed: An integer k for each stage: it recomputes the first k micro-batches. The
            engine runs the same number on all stages.
        order: The order of the actions.
    """

    balance: tuple[int, ...]
    chunks: int
    recomputed: tuple[int, ...]
    order: Order = FILL_DRAIN

    @property
    def activation_checkpointing(self) -> int | Literal["always", "except_last", "never"]:
        """As the engine takes it."""
        most = max(self.recomputed)
        if most == 0:
            return "never"
        return "always" if most == self.chunks else most

    def as_dict(self) -> dict[str, Any]:
        """As for JSON."""
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
        found = (
            f"balance={balance}, chunks={self.chunks}, "
            f"activation_checkpointing={self.activation_checkpointing!r}"
        )
        return ", ".join([found, *([self.order.written] if self.order.written else [])])
