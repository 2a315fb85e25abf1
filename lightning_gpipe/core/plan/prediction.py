"""What a mini-batch will take, by the costs of layers and the schedule that is to run.

The schedule is run with the measured time of each action. So the prediction knows what a formula
does not: that a recomputation fills a wait, or that micro-batches differ in size. From the same
order follows what each device holds when.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from math import inf
from typing import Any, Literal, NamedTuple

import numpy as np

from lightning_gpipe.core.plan.action import Action
from lightning_gpipe.core.plan.balance.costs import Place
from lightning_gpipe.core.plan.layout import Around
from lightning_gpipe.core.plan.measured import ModelProfile
from lightning_gpipe.core.plan.predicted_memory import FREES, Changes, Peaks
from lightning_gpipe.core.plan.predicted_stage import StagePrediction, held_by, together
from lightning_gpipe.core.plan.settings import Settings
from lightning_gpipe.core.plan.stage_cost import StageCost, costs_of
from lightning_gpipe.core.plan.turns import turns
from lightning_gpipe.core.plan.waves import Passing, Wave, waves


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
    def placement(self) -> tuple[int, ...]:
        """The worker of each stage."""
        workers = {device: w for w, device in enumerate(dict.fromkeys(self.devices))}
        return tuple(workers[device] for device in self.devices)

    @property
    def workers(self) -> list[int]:
        """The index of each worker's device."""
        return list(dict.fromkeys(self.devices))

    @property
    def time(self) -> float:
        """What a mini-batch takes."""
        return self._played.time

    @cached_property
    def bubble(self) -> float:
        """The share of the devices' time in which they are idle."""
        busy = sum(stage.time for stage in self.stages)
        return 1.0 - busy / (self.time * len(self.workers)) if self.time else 0.0

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
            Planned(self.placement[j], Action(wave.kind, i, j), start, end)
            for wave in self._waves()
            for i, j, start, end in zip(*(each.tolist() for each in wave[1:]), strict=True)
        )
        return tuple(sorted(found, key=lambda span: span.start))

    def memory_over_time(self) -> list[list[tuple[float, float]]]:
        """For each worker the times at which its bytes change, with what they are from then on."""
        always = [0.0] * len(self.workers)
        for worker, stage in zip(self.placement, self.stages, strict=True):
            always[worker] += stage.memory.held + stage.memory.outputs
        found = [[(0.0, each)] for each in always]
        for wave in self._waves():
            times = wave.end if wave.kind in FREES else wave.start
            changes = self._changes.of(wave).sum(axis=1)
            for j, at, change in zip(
                wave.j.tolist(), times.tolist(), changes.tolist(), strict=True
            ):
                own = found[self.placement[j]]
                own.append((at, own[-1][1] + change))
        return found

    def as_dict(self) -> dict[str, Any]:
        """Numbers, strings, lists and dicts, as for JSON."""
        return {
            **self.settings.as_dict(),
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
        most = max(stage.needed for stage in self.stages)
        return (
            f"{self.settings}: {time}, bubble {self.bubble:.1%}, at most {most / 2**30:.3g} GiB on "
            "a device"
        )

    @cached_property
    def _kinds(self) -> list[tuple[int, bool]]:
        """Of each micro-batch, its number of rows and whether it is recomputed."""
        most = max(self.settings.recomputed)
        return [(rows, i < most) for i, rows in enumerate(self.rows)]

    @cached_property
    def _costs(self) -> dict[int, list[StageCost]]:
        """What each stage costs for a micro-batch, by its number of rows."""
        balance, split = self.settings.balance, self.settings.order.split
        return {rows: costs_of(self.profile, balance, rows, split=split) for rows in {*self.rows}}

    def _waves(self) -> Iterator[Wave]:
        """All actions, with their times; those of each worker in its order."""
        of_kind = {kind: self._passing(*kind) for kind in {*self._kinds}}
        passings = [of_kind[kind] for kind in self._kinds]
        if not self.settings.order.by_micro_batch and len(self.workers) == len(self.places):
            return waves(passings)
        most = max(self.settings.recomputed)
        patterns = self.settings.order.patterns(len(self.rows), self.placement, most)
        return turns(patterns, passings, at_once=not self.settings.order.by_micro_batch)

    def _passing(self, rows: int, recomputed: bool) -> Passing:
        """What each stage takes for a micro-batch."""
        speed = np.array([place.speed for place in self.places])
        costs = self._costs[rows]
        forward, dropping, backward, weights = (
            np.array([getattr(cost, name) for cost in costs]) / speed
            for name in ("forward", "dropping", "backward", "weights")
        )
        parts = backward, weights if self.settings.order.split else None
        return Passing(dropping, forward, *parts) if recomputed else Passing(forward, None, *parts)

    @cached_property
    def _changes(self) -> Changes:
        return Changes(self._kinds, self._costs)

    @cached_property
    def _played(self) -> Peaks:
        """How long it takes, and what stages hold when their devices are at their peaks."""
        return Peaks(self._waves(), self._changes, self.placement)

    def _stages(self) -> Iterator[StagePrediction]:
        outside = len(self.places) - 1 if self.around == "last" else 0
        kinds = Counter(self._kinds)
        balance, found = self.settings.balance, []
        for j, (end, size) in enumerate(zip(accumulate(balance), balance, strict=True)):
            layers = self.profile.layers[end - size : end]
            held = [*layers, self.profile.around] if j == outside else layers
            activations, boundaries = self._played.of(j)
            costs = [
                (number, again, self._costs[rows][j]) for (rows, again), number in kinds.items()
            ]
            time = sum(
                number * (each.time + again * each.dropping) for number, again, each in costs
            )
            memory = held_by(held)._replace(
                activations=activations,
                boundaries=boundaries,
                outputs=self._outputs if j == outside else 0.0,
            )
            found.append(
                StagePrediction(
                    end - size,
                    tuple(layer.name for layer in layers),
                    self.devices[j],
                    sum(layer.parameters for layer in held),
                    time / self.places[j].speed,
                    memory,
                    self.places[j].memory,
                    sum(number * each.leaving for number, _, each in costs),
                )
            )
        yield from together(found)

    @property
    def _outputs(self) -> float:
        """The bytes of what the caller has of the last stage at once."""
        sizes = [self.profile.output.at(rows) for rows in self.rows]
        return max(sizes) if self.settings.order.by_micro_batch else sum(sizes)
