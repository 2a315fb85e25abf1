"""What a mini-batch will take, by the costs of layers and the schedule that is to run.

The schedule is simulated with the measured time of each action. So the prediction knows what a
formula does not: that a recomputation fills a wait, or that micro-batches differ in size. From the
same simulation follows what each device holds at which time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import islice
from math import inf
from typing import Any, Literal, NamedTuple

from lightning_gpipe.core.plan.action import Action, Kind
from lightning_gpipe.core.plan.balance.costs import Place
from lightning_gpipe.core.plan.fill_drain import fill_drain
from lightning_gpipe.core.plan.layout import Around
from lightning_gpipe.core.plan.measured import LayerProfile, ModelProfile
from lightning_gpipe.core.plan.schedule import Schedule


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

    def actions(self) -> Schedule:
        """The schedule of a mini-batch."""
        return fill_drain(
            self.chunks, tuple(range(len(self.balance))), recomputed=max(self.recomputed)
        )


class Memory(NamedTuple):
    """The bytes of a stage at the peak of a mini-batch.

    Attributes:
        parameters, gradients, optimizer, buffers: What it holds whatever runs.
        activations: What is saved for backward.
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
        return max((at + self._cost(action) for action, at in self._start.items()), default=0.0)

    @cached_property
    def bubble(self) -> float:
        """The share of the devices' time in which they are idle."""
        busy = sum(map(self._cost, self._start))
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
        found = (Planned(a.j, a, at, at + self._cost(a)) for a, at in self._start.items())
        return tuple(sorted(found, key=lambda span: span.start))

    def memory_over_time(self) -> list[list[tuple[float, float]]]:
        """For each stage the times at which its bytes change, with what they are from then on."""
        found: list[list[tuple[float, float]]] = [
            [(0.0, stage.memory.held)] for stage in self.stages
        ]
        for worker, action, start, end in self.spans:
            at = start if action.kind is not Kind.BACKWARD else end
            found[worker].append((at, found[worker][-1][1] + self._change(action)))
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
        chosen = self.settings
        time = f"{1e3 * self.time:.4g} ms" if self.unit == "s" else f"{self.time / 1e9:.4g} GFLOP"
        most = max(stage.memory.total for stage in self.stages)
        return (
            f"balance={list(chosen.balance)}, chunks={chosen.chunks}, activation_checkpointing="
            f"{chosen.activation_checkpointing!r}: {time}, bubble {self.bubble:.1%}, at most "
            f"{most / 2**30:.3g} GiB on a device"
        )

    @cached_property
    def _start(self) -> dict[Action, float]:
        """When each action starts: a phase when all of the previous one has ended."""
        schedule, at = self.settings.actions(), 0.0
        found: dict[Action, float] = {}
        for k in range(len(schedule.phases)):
            phase = schedule.phase(k).simulate(self._cost)
            found |= {action: at + start for action, start in phase.start.items()}
            at += phase.makespan
        return found

    @cached_property
    def _costs(self) -> dict[int, list[StageCost]]:
        """What each stage costs for a micro-batch, by its number of rows."""
        return {rows: costs_of(self.profile, self.settings.balance, rows) for rows in {*self.rows}}

    def _is_recomputed(self, i: int, j: int) -> bool:
        return i < self.settings.recomputed[j]

    def _cost(self, action: Action) -> float:
        kind, i, j = action
        costs = self._costs[self.rows[i]][j]
        if kind is Kind.BACKWARD:
            time = costs.backward
        elif kind is Kind.FORWARD and self._is_recomputed(i, j):
            time = costs.dropping
        else:
            time = costs.forward
        return time / self.places[j].speed

    def _change(self, action: Action) -> float:
        """The bytes by which what a stage holds changes with an action."""
        kind, i, j = action
        costs = self._costs[self.rows[i]][j]
        if kind is Kind.BACKWARD:
            return -costs.saved - costs.entering
        if kind is Kind.RECOMPUTE:
            return costs.saved
        return costs.entering + (0.0 if self._is_recomputed(i, j) else costs.saved)

    def _stages(self) -> Iterator[StagePrediction]:
        outside = len(self.places) - 1 if self.around == "last" else 0
        end = 0
        for j, (place, size) in enumerate(zip(self.places, self.settings.balance, strict=True)):
            first, end = end, end + size
            layers = self.profile.layers[first:end]
            held = [*layers, self.profile.around] if j == outside else layers
            own = [self._costs[rows][j] for rows in self.rows]
            k = self.settings.recomputed[j]
            time = sum(each.forward + each.backward for each in own)
            yield StagePrediction(
                first,
                tuple(layer.name for layer in layers),
                self.devices[j],
                sum(layer.parameters for layer in held),
                (time + sum(each.dropping for each in own[:k])) / place.speed,
                _memory(held, own, k),
                place.memory,
                sum(each.leaving for each in own),
            )


class StageCost(NamedTuple):
    """What a run of layers costs for a micro-batch, on a device of speed 1.

    Attributes:
        forward, dropping, backward: As of a layer.
        saved: The bytes that are saved for a backward.
        entering: The bytes of its inputs from other stages.
        leaving: The bytes that later stages get of it.
    """

    forward: float
    dropping: float
    backward: float
    saved: float
    entering: float = 0.0
    leaving: float = 0.0


def costs_of(profile: ModelProfile, balance: Sequence[int], rows: int) -> list[StageCost]:
    """What each stage of a balance costs for a micro-batch with so many rows."""
    stage_of = [j for j, size in enumerate(balance) for _ in range(size)]
    entering, leaving = [0.0] * len(balance), [0.0] * len(balance)
    for each in profile.carried:
        maker, user = stage_of[each.maker], stage_of[each.user]
        if maker != user:
            leaving[maker] += each.size.at(rows)
            entering[user] += each.size.at(rows)
    layers, found = iter(profile.layers), []
    for j, size in enumerate(balance):
        own = list(islice(layers, size))
        found.append(
            StageCost(
                sum(layer.forward.at(rows) for layer in own),
                sum(layer.dropping.at(rows) for layer in own),
                sum(layer.backward.at(rows) for layer in own),
                sum(layer.saved.at(rows) for layer in own),
                entering[j],
                leaving[j],
            )
        )
    return found


def sizes_of(rows: int, chunks: int) -> tuple[int, ...]:
    """The rows of each micro-batch, as even as possible; no more micro-batches than rows."""
    m = min(chunks, rows)
    return tuple(rows // m + (i < rows % m) for i in range(m))


def _memory(held: Iterable[LayerProfile], own: Sequence[StageCost], k: int) -> Memory:
    """What a stage needs at the peak, of whose micro-batches the first ``k`` are recomputed.

    That is at the end of forward or, if all are recomputed, when the first of them was. An input
    from another device is in memory there from its arrival to its backward.
    """
    held = list(held)
    saved = [each.saved for each in own]
    return Memory(
        sum(layer.parameter_bytes for layer in held),
        sum(layer.gradient_bytes for layer in held),
        sum(layer.optimizer_bytes for layer in held),
        sum(layer.buffer_bytes for layer in held),
        max(sum(saved[k:]), max(saved[:k], default=0.0)),
        sum(each.entering for each in own),
    )
