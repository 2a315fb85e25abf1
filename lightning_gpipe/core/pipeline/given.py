"""What a user has said of how a pipeline runs, and what was chosen of the rest."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from lightning_gpipe.core.data import check_chunks
from lightning_gpipe.core.plan import (
    ALWAYS_SPLIT,
    ActivationCheckpointing,
    Order,
    Plan,
    ScheduleName,
    check_activation_checkpointing,
    check_planned,
    check_schedule_name,
)

AUTO: Literal["auto"] = "auto"


class Choice(NamedTuple):
    """What a pipeline is made with.

    Attributes:
        balances: The balance of each module.
        chunks: The number of micro-batches.
        activation_checkpointing: Which of them are recomputed.
        order: In which order all of it runs.
        plan: The plan that says so; None if the user did.
    """

    balances: list[Any]
    chunks: int
    activation_checkpointing: ActivationCheckpointing
    order: Order
    plan: Plan | None = None

    @property
    def split_backward(self) -> bool:
        """Whether the engine is told to split backwards; one schedule always does."""
        return self.order.split and self.order.schedule not in ALWAYS_SPLIT


class Given(NamedTuple):
    """What the user has said of it; ``"auto"`` is planned.

    Attributes:
        chunks: The number of micro-batches.
        activation_checkpointing: Which of them are recomputed.
        schedule: What runs when.
        split_backward: Whether the gradients of the weights are computed apart.
    """

    chunks: int | Literal["auto"]
    activation_checkpointing: ActivationCheckpointing | Literal["auto"]
    schedule: ScheduleName | Literal["auto"] = "fill_drain"
    split_backward: bool | Literal["auto"] = False

    def check(self) -> None:
        """Check the numbers.

        Raises:
            TypeError, ValueError: If they have the wrong type, or a value that they cannot have.
        """
        if self.chunks != AUTO:
            check_chunks(self.chunks)
        if self.activation_checkpointing != AUTO:
            check_activation_checkpointing(self.activation_checkpointing)
        check_schedule_name(self.schedule)
        if self.planned:
            check_planned(self.schedule)
        if self.split_backward not in (True, False, AUTO):
            raise ValueError(
                f"split_backward must be True, False or 'auto': got {self.split_backward!r}."
            )

    @property
    def planned(self) -> list[str]:
        """What is, as the user wrote it."""
        return [f"{name}='auto'" for name, each in self._asdict().items() if each == AUTO]

    @property
    def choice(self) -> Choice:
        """What it comes to if nothing is planned, but for the balances."""
        chunks, mode, schedule, split = self
        assert chunks != AUTO and mode != AUTO and schedule != AUTO and split != AUTO
        return Choice([], chunks, mode, Order(schedule, split or schedule in ALWAYS_SPLIT))

    def measured_with(self) -> dict[str, Any]:
        """The arguments of :class:`Measuring` for it.

        A balance by memory goes by one number of micro-batches.
        """
        mode = self.activation_checkpointing
        split = self.schedule in (AUTO, *ALWAYS_SPLIT) or self.split_backward in (AUTO, True)
        return {
            "chunks": 1 if self.chunks == AUTO else self.chunks,
            "activation_checkpointing": "except_last" if mode == AUTO else mode,
            "split": split,
        }
