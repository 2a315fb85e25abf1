"""The settings of a pipeline: those that the user requests, and all of them once resolved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from lightning_gpipe.core.balance import ModelProfile
from lightning_gpipe.core.data import check_chunks
from lightning_gpipe.core.layout import ShardingName, Weights, check_weights
from lightning_gpipe.core.planner import Plan
from lightning_gpipe.core.schedules import (
    ActivationCheckpointing,
    AnySchedule,
    OffloadActivations,
    ScheduleKind,
    check_activation_checkpointing,
    check_offload_activations,
    check_planned,
    check_schedule,
)

AUTO: Literal["auto"] = "auto"


class Resolved(NamedTuple):
    """All settings of a pipeline, requested by the user or planned."""

    balances: list[Any]  # of each module; once cut, the units of each stage
    chunks: int
    activation_checkpointing: ActivationCheckpointing
    order: ScheduleKind
    weights: Weights = "device"
    offload_activations: OffloadActivations = False
    plan: Plan | None = None  # None if the user requested all of it
    profiles: Sequence[ModelProfile] = ()  # of each module; none if nothing was measured

    @property
    def schedule(self) -> AnySchedule:
        return self.order.schedule

    @property
    def split_backward(self) -> bool:
        """True if the engine must be told to split backwards; some schedules always do."""
        return self.order.split and not self.order.definition.always_split


class Requested(NamedTuple):
    """The settings that the user requests; those that are ``"auto"`` are planned."""

    chunks: int | Literal["auto"]
    activation_checkpointing: ActivationCheckpointing | Literal["auto"]
    schedule: AnySchedule | Literal["auto"] = "fill_drain"
    split_backward: bool | Literal["auto"] = False
    weights: Weights | Literal["auto"] = "device"
    offload_activations: OffloadActivations | Literal["auto"] = False
    sharding: ShardingName | Literal["auto"] | None = None
    replicas: int = 1

    def check(self) -> None:
        if self.chunks != AUTO:
            check_chunks(self.chunks)
        if self.activation_checkpointing != AUTO:
            check_activation_checkpointing(self.activation_checkpointing)
        check_schedule(self.schedule)
        if self.weights != AUTO:
            check_weights(self.weights)
        if self.planned:
            check_planned(self.schedule)
        if self.offload_activations != AUTO:
            check_offload_activations(self.offload_activations)
        if self.split_backward not in (True, False, AUTO):
            raise ValueError(
                f"split_backward must be True, False or 'auto': got {self.split_backward!r}."
            )

    @property
    def planned(self) -> list[str]:
        return [f"{name}='auto'" for name, value in self._asdict().items() if value == AUTO]

    def planned_as(self, earlier: Resolved) -> Requested:
        """Return the request with the settings of an earlier plan for those that are planned."""
        fields = self._asdict().items()
        return self._replace(**{name: getattr(earlier, name) for name, x in fields if x == AUTO})

    @property
    def needs_split_costs(self) -> bool:
        if self.schedule == AUTO or self.split_backward == AUTO:
            return True
        return ScheduleKind.of(self.schedule, split=self.split_backward).split
