"""The settings of a pipeline that a plan chooses, and the numbers that it tries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

from lightning_gpipe.core.layout import ShardingName, Weights
from lightning_gpipe.core.schedules import FILL_DRAIN, ScheduleKind

_LISTED = 64  # stages whose layers a message lists


class PlannedSettings(NamedTuple):
    """The settings of a pipeline that a plan chooses; a candidate while it has no balance."""

    stages: int
    chunks: int
    recomputed: tuple[int, ...] = ()  # each stage's first k micro-batches; empty if unknown
    order: ScheduleKind = FILL_DRAIN
    balance: tuple[int, ...] = ()
    weights: Weights = "device"  # between their uses
    offload: bool | tuple[int, ...] | Literal["auto"] = False  # "auto": as few as fit
    sharding: ShardingName | None = None  # divided among replicas

    def alike(self, recomputed: int) -> PlannedSettings:
        return self._replace(recomputed=(recomputed,) * self.stages, balance=())

    @property
    def activation_checkpointing(self) -> int | list[int] | Literal["always", "never"]:
        number, *others = {*self.recomputed}
        if others:
            return list(self.recomputed)
        if number == 0:
            return "never"
        return "always" if number == self.chunks else number

    @property
    def offload_activations(self) -> bool | list[int]:
        if isinstance(self.offload, tuple):
            return any(self.offload) and list(self.offload)
        return bool(self.offload)

    @property
    def arguments(self) -> list[str]:
        """The user's arguments for them, but for the balance, without defaults; lists in brief."""
        mode = self.activation_checkpointing
        written = _listed(mode) if isinstance(mode, list) else repr(mode)
        arguments = [f"chunks={self.chunks}", f"activation_checkpointing={written}"]
        if self.order.arguments:
            arguments.append(self.order.arguments)
        if self.weights == "host":
            arguments.append("weights='host'")
        if offload := self.offload_activations:
            numbers = offload if isinstance(offload, bool) else _listed(offload)
            arguments.append(f"offload_activations={numbers}")
        if self.sharding is not None:
            arguments.append(f"sharding={self.sharding!r}")
        return arguments

    @property
    def has_visits(self) -> bool:
        """True if a device has weights around their use only."""
        return self.weights == "host" or self.sharding == "parameters"

    @property
    def on_host(self) -> str:
        places = {"weights": self.weights == "host", "activations": self.offload_activations}
        return ", ".join(name for name, there in places.items() if there)

    @property
    def places(self) -> tuple[Weights, bool, ShardingName | None]:
        return self.weights, bool(self.offload), self.sharding

    def as_dict(self) -> dict[str, Any]:
        return {
            "balance": list(self.balance),
            "chunks": self.chunks,
            "activation_checkpointing": self.activation_checkpointing,
            "schedule": self.order.schedule,
            "split_backward": self.order.split,
            "weights": self.weights,
            "offload_activations": self.offload_activations,
            "sharding": self.sharding,
        }

    def __str__(self) -> str:
        arguments = [f"balance={_listed(self.balance)}", *self.arguments]
        return ", ".join(arguments)


def _listed(numbers: Sequence[int]) -> str:
    """The numbers as a list; of more than a screen of them the first ones."""
    if len(numbers) <= _LISTED:
        return str(list(numbers))
    return f"[{', '.join(map(str, numbers[:3]))}, ... of {len(numbers)}]"


def near(best: PlannedSettings, candidates: Sequence[PlannedSettings]) -> Iterator[PlannedSettings]:
    """Yield the candidates that differ from the best in one thing, or recompute nothing or all."""
    n, m = best.stages, best.chunks
    candidates = [c for c in candidates if (c.order, c.places) == (best.order, best.places)]
    by_stages = {c.stages: c for c in candidates if c.chunks == m}
    by_chunks = {c.chunks: c for c in candidates if c.stages == n}
    for other in _beside(sorted(by_stages), n):
        yield by_stages[other]
    for other in _beside(sorted(by_chunks), m):
        yield by_chunks[other]
    if not by_stages[n].recomputed:  # it was to be chosen
        yield from (best.alike(k) for k in (0, m) if {*best.recomputed} != {k})


def _beside(values: Sequence[int], value: int) -> list[int]:
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
