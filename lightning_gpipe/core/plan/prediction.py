"""What a mini-batch will take, by the costs of layers and the schedule that is to run.

The schedule is run with the measured time of each action. So the prediction knows what a formula
does not: that a recomputation fills a wait, or that micro-batches differ in size. From the same
times follows what each device holds when.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import islice
from math import inf
from typing import Any, Literal, NamedTuple

import numpy as np

from lightning_gpipe.core.plan.action import Action, Kind
from lightning_gpipe.core.plan.balance.costs import Place
from lightning_gpipe.core.plan.layout import Around
from lightning_gpipe.core.plan.measured import LayerProfile, ModelProfile
from lightning_gpipe.core.plan.waves import Passing, Wave, waves

_LISTED = 64  # stages whose layers a message lists


@dataclass(frozen=True)
class Settings:
    """What is decided about a pipeline with a stage for each device.

    Attributes:
        balance: The number of layers in each stage.
        chunks: The number of micro-batches.
        recomputed: An integer k for each stage: it recomputes the first k micro-batches. The
            engine runs the same number on all stages.
        schedule: The order of the actions.
    """

    balance: tuple[int, ...]
    chunks: int
    recomputed: tuple[int, ...]
    schedule: Literal["fill_drain"] = "fill_drain"

    @property
    def activation_checkpointing(self) -> int | Literal["always", "except_last", "never"]:
        """As the engine takes it."""
        most = max(self.recomputed)
        if most == 0:
            return "never"
        return "always" if most == self.chunks else most

    def __str__(self) -> str:
        balance = str(list(self.balance))
        if len(self.balance) > _LISTED:
            balance = f"[{', '.join(map(str, self.balance[:3]))}, ... of {len(self.balance)}]"
        return (
            f"balance={balance}, chunks={self.chunks}, "
            f"activation_checkpointing={self.activation_checkpointing!r}"
        )


class Memory(NamedTuple):
    """The bytes of a stage at the peak of a mini-batch.

    Attributes:
        parameters, gradients, optimizer, buffers: What it holds whatever runs.
        activations: What is saved for backward, but for the boundaries.
        boundaries: The inputs from other stages, kept until their backward.
    """

    parameters: float
    gradients: float
    optimizer: float
    buffers: float
    activations: float
    boundaries: float

    @property
    def held(self) -> float:
        """The bytes that it needs whatever runs."""
        return self.parameters + self.gradients + self.optimizer + self.buffers

    @property
    def total(self) -> float:
        """All of them."""
        return self.held + self.activations + self.boundaries


@dataclass(frozen=True)
class StagePrediction:
    """What is predicted of a stage.

    Attributes:
        first: The index of its first layer.
        layers: The names of its layers.
        device: The index of its device.
        parameters: The number of elements of its parameters, those around the layers included.
        time: What a mini-batch takes it, without waits.
        memory: The bytes at its peak.
        limit: The bytes of its device; infinite if they are not known.
        sent: The bytes that a mini-batch sends from it to later stages; as much comes back.
    """

    first: int
    layers: tuple[str, ...]
    device: int
    parameters: int
    time: float
    memory: Memory
    limit: float
    sent: float

    @property
    def missing(self) -> float:
        """The bytes that its device lacks."""
        return max(0.0, self.memory.total - self.limit)

    def as_dict(self) -> dict[str, Any]:
        """Numbers and strings, as for JSON."""
        limit = None if self.limit == inf else self.limit
        memory = {**self.memory._asdict(), "total": self.memory.total}
        return {**asdict(self), "layers": list(self.layers), "memory": memory, "limit": limit}


class Planned(NamedTuple):
    """An action as it is predicted; times in the unit of the costs, from the first action."""

    worker: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Prediction:
    """What a mini-batch will take with some settings.

    The time is that of forward and backward in the pipeline. The loss, what is around the layers
    and the step of the optimizer come to it.

    Attributes:
        settings: The settings.
        profile: The costs that it goes by.
        places: What each stage runs on.
        rows: The number of rows of each micro-batch.
        around: Which stage what is around the layers is with.
        devices: The index of each stage's device.
    """

    settings: Settings
    profile: ModelProfile = field(repr=False)
    places: tuple[Place, ...]
    rows: tuple[int, ...]
    around: Around
    devices: tuple[int, ...]

    @property
    def unit(self) -> Literal["s", "FLOP"]:
        """The unit of times."""
        return self.profile.unit

    @cached_property
    def time(self) -> float:
        """What a mini-batch takes."""
        (last,) = deque(self._waves(), maxlen=1)
        return float(last.end.max())

    @cached_property
    def bubble(self) -> float:
        """The share of the devices' time in which they are idle."""
        busy = sum(stage.time for stage in self.stages)
        return 1.0 - busy / (self.time * len(self.places)) if self.time else 0.0

    @property
    def throughput(self) -> float:
        """The rows in a unit of time."""
        return sum(self.rows) / self.time if self.time else inf

    @cached_property
    def stages(self) -> tuple[StagePrediction, ...]:
        """What is predicted of each stage."""
        return tuple(self._stages())

    @property
    def missing(self) -> list[float]:
        """The bytes that each stage's device lacks."""
        return [stage.missing for stage in self.stages]

    @cached_property
    def spans(self) -> tuple[Planned, ...]:
        """Every action, by its start."""
        found = (
            Planned(j, Action(wave.kind, wave.i, j), start, end)
            for wave in self._waves()
            for j, (start, end) in enumerate(
                zip(wave.start.tolist(), wave.end.tolist(), strict=True)
            )
        )
        return tuple(sorted(found, key=lambda span: span.start))

    def memory_over_time(self) -> list[list[tuple[float, float]]]:
        """For each stage the times at which its bytes change, with what they are from then on."""
        found: list[list[tuple[float, float]]] = [
            [(0.0, stage.memory.held)] for stage in self.stages
        ]
        for wave in self._waves():
            times = wave.start if wave.kind is not Kind.BACKWARD else wave.end
            for j, at in enumerate(times.tolist()):
                change = self._change(Action(wave.kind, wave.i, j))
                found[j].append((at, found[j][-1][1] + change))
        return found

    def as_dict(self) -> dict[str, Any]:
        """Numbers, strings, lists and dicts, as for JSON."""
        return {
            "balance": list(self.settings.balance),
            "chunks": self.settings.chunks,
            "activation_checkpointing": self.settings.activation_checkpointing,
            "schedule": self.settings.schedule,
            "rows": sum(self.rows),
            "unit": self.unit,
            "time": self.time,
            "bubble": self.bubble,
            "throughput": self.throughput,
            "memory": sum(stage.memory.total for stage in self.stages),
            "stages": [stage.as_dict() for stage in self.stages],
        }

    def __str__(self) -> str:
        time = f"{1e3 * self.time:.4g} ms" if self.unit == "s" else f"{self.time / 1e9:.4g} GFLOP"
        most = max(stage.memory.total for stage in self.stages)
        return (
            f"{self.settings}: {time}, bubble {self.bubble:.1%}, at most {most / 2**30:.3g} GiB on "
            "a device"
        )

    def _waves(self) -> Iterator[Wave]:
        """All actions, with their times."""
        most = max(self.settings.recomputed)
        kept = {rows: self._passing(rows, False) for rows in {*self.rows[most:]}}
        dropped = {rows: self._passing(rows, True) for rows in {*self.rows[:most]}}
        own = [dropped[rows] for rows in self.rows[:most]]
        return waves([*own, *(kept[rows] for rows in self.rows[most:])])

    def _passing(self, rows: int, recomputed: bool) -> Passing:
        """What each stage takes for a micro-batch."""
        speed = np.array([place.speed for place in self.places])
        forward, dropping, backward = (
            np.array([cost[k] for cost in self._costs[rows]]) / speed for k in range(3)
        )
        if recomputed:
            return Passing(dropping, forward, backward)
        return Passing(forward, None, backward)

    @cached_property
    def _costs(self) -> dict[int, list[StageCost]]:
        """What each stage costs for a micro-batch, by its number of rows."""
        return {rows: costs_of(self.profile, self.settings.balance, rows) for rows in {*self.rows}}

    def _change(self, action: Action) -> float:
        """The bytes by which what a stage holds changes with an action."""
        kind, i, j = action
        costs = self._costs[self.rows[i]][j]
        if kind is Kind.BACKWARD:
            return -costs.saved - costs.entering
        if kind is Kind.RECOMPUTE:
            return costs.saved
        return costs.entering + (0.0 if i < self.settings.recomputed[j] else costs.saved)

    def _stages(self) -> Iterator[StagePrediction]:
        outside = len(self.places) - 1 if self.around == "last" else 0
        end = 0
        for j, (place, size) in enumerate(zip(self.places, self.settings.balance, strict=True)):
            first, end = end, end + size
            layers = self.profile.layers[first:end]
            held = [*layers, self.profile.around] if j == outside else layers
            k = self.settings.recomputed[j]
            dropped, kept = self._counted(self.rows[:k], j), self._counted(self.rows[k:], j)
            time = sum(number * (each.forward + each.backward) for number, each in dropped + kept)
            time += sum(number * each.dropping for number, each in dropped)
            yield StagePrediction(
                first,
                tuple(layer.name for layer in layers),
                self.devices[j],
                sum(layer.parameters for layer in held),
                time / place.speed,
                _memory(held, dropped, kept),
                place.memory,
                sum(number * each.leaving for number, each in dropped + kept),
            )

    def _counted(self, rows: Sequence[int], j: int) -> _Counted:
        """What micro-batches cost a stage; those of equal size are counted."""
        return [(number, self._costs[size][j]) for size, number in Counter(rows).items()]


class StageCost(NamedTuple):
    """What a run of layers costs for a micro-batch, on a device of speed 1.

    Attributes:
        forward, dropping, backward: As of a layer.
        saved: The bytes that are saved for a backward, its inputs from other stages not included.
        entering: The bytes of its inputs from other stages.
        leaving: The bytes that later stages get of it.
    """

    forward: float
    dropping: float
    backward: float
    saved: float
    entering: float = 0.0
    leaving: float = 0.0


_Counted = list[tuple[int, StageCost]]  # with the number of micro-batches


def costs_of(profile: ModelProfile, balance: Sequence[int], rows: int) -> list[StageCost]:
    """What each stage of a balance costs for a micro-batch with so many rows."""
    stage_of = [j for j, size in enumerate(balance) for _ in range(size)]
    entering, leaving, twice = ([0.0] * len(balance) for _ in range(3))
    for each in profile.carried:
        maker, user = stage_of[each.maker], stage_of[each.user]
        if maker != user:
            leaving[maker] += each.size.at(rows)
            entering[user] += each.size.at(rows)
            twice[user] += each.saved.at(rows)
    layers, found = iter(profile.layers), []
    for j, size in enumerate(balance):
        own = list(islice(layers, size))
        found.append(
            StageCost(
                sum(layer.forward.at(rows) for layer in own),
                sum(layer.dropping.at(rows) for layer in own),
                sum(layer.backward.at(rows) for layer in own),
                sum(layer.saved.at(rows) for layer in own) - twice[j],
                entering[j],
                leaving[j],
            )
        )
    return found


def sizes_of(rows: int, chunks: int) -> tuple[int, ...]:
    """The rows of each micro-batch, as even as possible; no more micro-batches than rows."""
    m = min(chunks, rows)
    return tuple(rows // m + (i < rows % m) for i in range(m))


def _memory(held: Iterable[LayerProfile], dropped: _Counted, kept: _Counted) -> Memory:
    """What a stage needs at the peak.

    That is at the end of forward or, if all are recomputed, when the first of them was. An input
    from another device is in memory there from its arrival to its backward.

    Args:
        held: The layers that it holds.
        dropped: The micro-batches that it recomputes.
        kept: The others.
    """
    held = list(held)
    return Memory(
        sum(layer.parameter_bytes for layer in held),
        sum(layer.gradient_bytes for layer in held),
        sum(layer.optimizer_bytes for layer in held),
        sum(layer.buffer_bytes for layer in held),
        max(
            sum(number * each.saved for number, each in kept),
            max((each.saved for _, each in dropped), default=0.0),
        ),
        sum(number * each.entering for number, each in dropped + kept),
    )
