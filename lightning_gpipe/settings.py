"""What the user says of the pipelines in a LightningModule, checked before there is one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from lightning_gpipe.core.data import MicroBatching, check_microbatching
from lightning_gpipe.core.pipeline import Given, balance_of_each
from lightning_gpipe.core.plan import ActivationCheckpointing, Around, ScheduleName, check_around
from lightning_gpipe.core.run import Threads, check_threads
from lightning_gpipe.refusals import check_any_balance, check_module
from lightning_gpipe.steps import FOLDED


@dataclass(frozen=True)
class Settings:
    """Arguments of :class:`~lightning_gpipe.GPipeStrategy`, as the user gave them.

    Of ``activation_checkpointing``, what its None stands for.

    Raises:
        TypeError, ValueError: If one has the wrong type or an impossible value.
    """

    balance: Any
    chunks: int | Literal["auto"] | None
    module: str | list[str] | None
    schedule: ScheduleName | Literal["auto"]
    activation_checkpointing: ActivationCheckpointing | Literal["auto"]
    deferred_batch_norm: bool
    microbatching: MicroBatching | None
    threads: Threads
    split_backward: bool | Literal["auto"]
    verify: bool
    around: Around

    def __post_init__(self) -> None:
        check_module(self.module)
        for each in self.balances:
            check_any_balance(each)
        self.given(1, self.schedule).check()
        check_microbatching(self.microbatching)
        check_around(self.around)
        check_threads(self.threads)

    @property
    def balances(self) -> list[Any]:
        """The balance of each module."""
        return balance_of_each(self.module, self.balance)

    @property
    def folded(self) -> bool:
        """Whether the stages go down the devices and back, so that the last is on the first."""
        return self.schedule == FOLDED

    def given(self, otherwise: int, schedule: ScheduleName | Literal["auto"]) -> Given:
        """What may be planned.

        Args:
            otherwise: The number of micro-batches where the user has given none.
            schedule: What runs when, of what is possible.
        """
        chunks = otherwise if self.chunks is None else self.chunks
        return Given(chunks, self.activation_checkpointing, schedule, self.split_backward)
