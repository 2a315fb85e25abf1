"""Predicts the time and the memory of a mini-batch from the costs of layers and the schedule.

The schedule is simulated, with recomputations that fill waits and micro-batches of several sizes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import accumulate
from math import inf
from operator import ge
from typing import Any, Literal

from lightning_gpipe.core.balance import ModelProfile, Place
from lightning_gpipe.core.layout import Around, layer_ranges, outside_stage
from lightning_gpipe.core.planner.action_costs import ActionCosts, Bytes, least_number, most_alive
from lightning_gpipe.core.planner.predicted_stage import HeldShares, Memory, StagePrediction
from lightning_gpipe.core.planner.row_actions import ROW_KINDS, RowActions, row_actions
from lightning_gpipe.core.planner.settings import PlannedSettings
from lightning_gpipe.core.planner.stage_cost import MicroBatchCost, costs_of, output_bytes
from lightning_gpipe.core.planner.waves import Waves, waves_of
from lightning_gpipe.core.schedules import Action, Kind, ScheduleKind, Span, offloaded_by_stage

_FREES = frozenset({Kind.BACKWARD, Kind.WEIGHTS})  # at their ends; others add at their starts


@dataclass(frozen=True)
class Prediction:
    """The predicted time and memory of a mini-batch with some settings, which have a balance.

    The time is that of forward and backward in the pipeline, without the loss, the modules around
    the layers and the step of the optimizer.
    """

    settings: PlannedSettings
    profile: ModelProfile = field(repr=False)
    places: tuple[Place, ...]  # of each stage
    rows: tuple[int, ...]  # of each micro-batch
    around: Around  # the stage whose device has the modules around the layers
    devices: tuple[int, ...]  # of each stage, by index
    replicas: int = 1  # pipelines, each on devices like these

    @property
    def unit(self) -> Literal["s", "FLOP"]:
        return self.profile.unit

    @cached_property
    def placement(self) -> tuple[int, ...]:
        workers = {device: w for w, device in enumerate(dict.fromkeys(self.devices))}
        return tuple(workers[device] for device in self.devices)

    @property
    def workers(self) -> list[int]:
        return list(dict.fromkeys(self.devices))

    @cached_property
    def time(self) -> float:
        return self._waves.makespan(self._actions)

    @cached_property
    def bubble(self) -> float:
        """The share of the devices' time that they are idle."""
        busy = sum(stage.time for stage in self.stages)
        share = 1.0 - busy / (self.time * len(self.workers)) if self.time else 0.0
        return max(0.0, share)  # rounding may make it less

    @property
    def throughput(self) -> float:
        """The rows in a unit of time."""
        return sum(self.rows) / self.time if self.time else inf

    @cached_property
    def stages(self) -> tuple[StagePrediction, ...]:
        stages = list(self._stages())
        needed: defaultdict[int, float] = defaultdict(float)
        for stage in stages:
            needed[stage.device] += stage.memory.total
        besides = [needed[stage.device] - stage.memory.total for stage in stages]
        pairs = zip(stages, besides, strict=True)
        return tuple(replace(stage, beside=size) if size else stage for stage, size in pairs)

    @property
    def missing(self) -> list[float]:
        return [stage.missing for stage in self.stages]

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """The spans of all actions, by their starts; times in :attr:`unit`."""
        spans = (
            Span(self.placement[action.j], action, start, end)
            for action, start, end, _ in self._timed()
            if action.kind is not Kind.RECOMPUTE or action.i < self.settings.recomputed[action.j]
        )
        return tuple(sorted(spans, key=lambda span: span.start))

    def memory_over_time(self) -> list[list[tuple[float, float]]]:
        """Return for each worker the times at which its bytes change, with the bytes from then."""
        always = [0.0] * len(self.workers)
        for j, (worker, stage) in enumerate(zip(self.placement, self.stages, strict=True)):
            always[worker] += stage.memory.held + stage.memory.outputs + self._under_way.get(j, 0.0)
        bytes_over_time = [[(0.0, held)] for held in always]
        for action, start, end, change in self._timed():
            own = bytes_over_time[self.placement[action.j]]
            own.append((end if action.kind in _FREES else start, own[-1][1] + change))
        return bytes_over_time

    def as_dict(self) -> dict[str, Any]:
        """Return numbers, strings, lists and dicts, for JSON."""
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
    def _costs(self) -> dict[int, list[MicroBatchCost]]:
        """The costs of each stage for a micro-batch, by its number of rows."""
        balance, split = self.settings.balance, self.settings.order.split
        return {rows: costs_of(self.profile, balance, rows, split=split) for rows in {*self.rows}}

    @cached_property
    def _actions(self) -> ActionCosts:
        offloaded, under_way = self._offloaded()
        return ActionCosts(
            self._costs,
            self.rows,
            self.settings.recomputed,
            self.places,
            transfers=self._transfers,
            offloaded=offloaded,
            under_way=under_way,
        )

    def _offloaded(self) -> tuple[list[float], list[float]]:
        """The share of each stage's micro-batches that wait on the host, and of these those here.

        Three with forwards and backwards in turns: one that leaves, one that comes, one at work.
        """
        order, offload = self.settings.order, self.settings.offload
        if not offload:
            return [], []
        n, most = len(self.devices), 2 + order.by_micro_batch
        alive = most_alive(order, len(self.rows), self.placement)
        numbers = offloaded_by_stage(True if offload == "auto" else offload, n)
        waiting = list(map(min, numbers, alive))
        return [k / of for k, of in zip(waiting, alive, strict=True)], [
            min(k, most) for k in waiting
        ]

    @property
    def _transfers(self) -> list[tuple[float, float]]:
        """The times in which weights come from elsewhere, and gradients go there, of each stage.

        Elsewhere is the host, or the other replicas, to which gradients go in any case.
        """
        if self.settings.sharding == "parameters":
            others = 1 - 1 / self.replicas
            return [
                (
                    others
                    * sum(self.profile.layers[k].parameter_bytes for k in own)
                    / place.replica_speed,
                    0.0,
                )
                for own, place in zip(self._layers, self.places, strict=True)
            ]
        if self.settings.weights == "device":
            return []
        return [
            (
                sum(self.profile.layers[k].parameter_bytes for k in own) / place.host_speed,
                sum(self.profile.layers[k].gradient_bytes for k in own) / place.host_speed,
            )
            for own, place in zip(self._layers, self.places, strict=True)
        ]

    def _timed(self) -> Iterator[tuple[Action, float, float, float]]:
        """Yield each action with its start, its end and the bytes that it adds, by workers."""
        actions, timing = self._rows, self._waves.timing(self._actions)
        changes = self._actions.total_changes(actions)
        columns = (*actions[:3], *timing, changes)
        for kind, i, j, *numbers in zip(*(each.tolist() for each in columns), strict=True):
            yield Action(ROW_KINDS[kind], i, j), *numbers

    @property
    def _schedule(self) -> tuple[ScheduleKind, int, tuple[int, ...], tuple[int, ...]]:
        return self.settings.order, len(self.rows), self.placement, self.settings.recomputed

    @property
    def _rows(self) -> RowActions:
        return row_actions(*self._schedule)

    @property
    def _waves(self) -> Waves:
        return waves_of(*self._schedule, from_host=self._actions.transfers is not None)

    @cached_property
    def _peaks(self) -> Bytes:
        return self._actions.at_peaks(self._rows)

    def least_recomputed(self) -> tuple[int, ...]:
        n = len(self.devices)
        return self._least(
            len(self.rows),
            lambda number: self._actions.recomputing(number),
            lambda number: self._with(recomputed=(number,) * n),
        )

    def least_offloaded(self) -> Literal[True] | tuple[int, ...]:
        """Return how many micro-batches of each stage must wait on the host; True is all."""
        n = len(self.devices)
        alive = most_alive(self.settings.order, len(self.rows), self.placement)
        away = cache(lambda number: self._with(offload=(number,) * n))
        numbers = self._least(max(alive), lambda number: away(number)._actions, away)
        return True if all(map(ge, numbers, alive)) else numbers

    def _least(
        self, most: int, costs: Callable[[int], ActionCosts], others: Callable[[int], Prediction]
    ) -> tuple[int, ...]:
        """Return for each stage the least number, up to ``most``, with which its device fits.

        Costs and predictions follow from the same number for all stages. All stages of a device
        have the same and, if the order of actions depends on recomputation, all devices have.
        """
        if self.settings.order.definition.rows is not None:
            return (
                bisect_left(range(most), True, key=lambda k: not any(others(k).missing)),
            ) * len(self.devices)
        numbers, guess, costs = {}, 0, cache(costs)
        for device, row in zip(self.workers, self._rows.rows(), strict=True):
            numbers[device] = guess = least_number(row, costs, most, self.room[device], guess)
        return tuple(numbers[device] for device in self.devices)

    def _with(self, **settings: Any) -> Prediction:
        return replace(self, settings=self.settings._replace(**settings))

    @cached_property
    def room(self) -> dict[int, float]:
        """The bytes that each device has for activations."""
        room = {device: self.places[j].memory for j, device in enumerate(self.devices)}
        for j, device in enumerate(self.devices):
            room[device] -= self._static[j].total
        return room

    @cached_property
    def _under_way(self) -> dict[int, float]:
        """The bytes of activations on their way from and to the host, at one stage of a device."""
        most: dict[int, tuple[float, int]] = {}
        for j, device in enumerate(self.devices):
            most[device] = max(most.get(device, (0.0, 0)), (self._actions.under_way(j), j))
        return {j: size for size, j in most.values()}

    @cached_property
    def _layers(self) -> list[range]:
        return layer_ranges(self.settings.balance)

    @cached_property
    def _outside(self) -> int:
        """The stage whose device has the modules around the layers."""
        return outside_stage(self.around, len(self.places))

    @cached_property
    def _static(self) -> list[Memory]:
        """The bytes of each stage whatever runs, and the outputs."""
        return list(map(self._static_of, range(len(self._layers))))

    def _static_of(self, j: int) -> Memory:
        own = self._layers[j]
        layers = self.profile.layers[own.start : own.stop]
        shares = HeldShares.of_stages(self.settings, self.replicas)
        if j in self._resident:
            shares = shares._replace(parameters=1.0, gradients=1.0)
        elif self.settings.order.by_micro_batch:
            shares = shares._replace(gradients=1.0)
        held = Memory.of(layers).divided(shares)
        if j == self._outside:
            shares = HeldShares.around_stages(self.settings, self.replicas)
            around = Memory.of([self.profile.around]).divided(shares)
            outputs = output_bytes(self.profile, self.rows, self.settings.order)
            held = Memory(*map(sum, zip(held, around, strict=True)))._replace(outputs=outputs)
        return held

    @cached_property
    def _resident(self) -> frozenset[int]:
        """The stages whose weights are on a device at once, if they come and go.

        Of each device two, at work and next: those with the most weights. Gradients of two stages
        are there with one loss, and else those of all.
        """
        of_device: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        for j, own in enumerate(self._layers):
            size = sum(self.profile.layers[k].parameter_bytes for k in own)
            of_device[self.devices[j]].append((size, j))
        return frozenset(j for sizes in of_device.values() for _, j in sorted(sizes)[-2:])

    def _stages(self) -> Iterator[StagePrediction]:
        sizes = Counter(self.rows).items()
        first = {rows: [0, *accumulate(size == rows for size in self.rows)] for rows, _ in sizes}
        for j, own in enumerate(self._layers):
            layers = self.profile.layers[own.start : own.stop]
            held = [*layers, self.profile.around] if j == self._outside else layers
            again = self.settings.recomputed[j]
            costs = [(number, self._costs[rows][j], first[rows][again]) for rows, number in sizes]
            time = sum(number * cost.time + again * cost.dropping for number, cost, again in costs)
            activations, boundaries = self._peaks[j].tolist()
            activations += self._under_way.get(j, 0.0)
            yield StagePrediction(
                own.start,
                tuple(layer.name for layer in layers),
                self.devices[j],
                sum(layer.parameters for layer in held),
                time / self.places[j].speed,
                self._static[j]._replace(activations=activations, boundaries=boundaries),
                self.places[j].memory,
                sum(number * cost.leaving for number, cost, _ in costs),
            )
