"""The options of the pipelines in a LightningModule, checked before there is one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lightning_gpipe.core.data import MicroBatching, check_microbatching
from lightning_gpipe.core.layout import Around, check_around
from lightning_gpipe.core.pipeline import Requested, balance_of_each
from lightning_gpipe.core.run import Threads, check_threads
from lightning_gpipe.core.schedules import SCHEDULES, ActivationCheckpointing, ScheduleName
from lightning_gpipe.strategy.refusals import check_any_balance, check_module


@dataclass(frozen=True)
class StrategyOptions:
    """The arguments of :class:`~lightning_gpipe.GPipeStrategy` that are about pipelines.

    ``activation_checkpointing`` has its default in the place of None.

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
        for balance in self.balances:
            check_any_balance(balance)
        self.given(1, self.schedule).check()
        check_microbatching(self.microbatching)
        check_around(self.around)
        check_threads(self.threads)

    @property
    def balances(self) -> list[Any]:
        """The balance of each module."""
        return balance_of_each(self.module, self.balance)

    def facts(self) -> dict[str, Any]:
        """The options that must be the same in all processes."""
        return {
            "balance": self.balance,
            "chunks": self.chunks,
            "path": self.module,
            "activation_checkpointing": self.activation_checkpointing,
            "deferred_batch_norm": self.deferred_batch_norm,
            "around": self.around,
        }

    @property
    def folded(self) -> bool:
        """True if the stages go down the devices and back, so that the last is on the first."""
        return self.schedule != "auto" and SCHEDULES[self.schedule].folded

    def given(self, otherwise: int, schedule: ScheduleName | Literal["auto"]) -> Requested:
        """The options that may be planned.

        Args:
            otherwise: The number of micro-batches if the user leaves it open.
            schedule: The schedule that the LightningModule allows.
        """
        chunks = otherwise if self.chunks is None else self.chunks
        return Requested(chunks, self.activation_checkpointing, schedule, self.split_backward)


def as_typed(function: Callable[..., Any], values: Mapping[str, Any]) -> str:
    """The arguments that differ from their defaults, such as ``balance=[2, 4], chunks=8``.

    Args:
        function: The function that was called.
        values: The value of each parameter, and other entries.
    """
    parameters = inspect.signature(function).parameters.items()
    return ", ".join(
        f"{name}={values[name]!r}"
        for name, parameter in parameters
        if values[name] != parameter.default
    )
