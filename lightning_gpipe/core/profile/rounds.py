"""Runs the layers of a model one by one, round after round, and measures each of them.

The first round counts bytes, and on the meta device operations; the others measure times as a
mini-batch has them. A layer that runs repeatedly finds its parameters in the cache, and its
gradients in memory that is in use; in a mini-batch other layers run in between. So each layer is
measured once in a round, and the gradients of several layers are alive at once. If the machine is
slow for a moment, that is one measurement of many layers, which medians leave out. Of layers that
are alike a round measures one. There are as many rounds as it takes until their sum is known: a
stage of many layers is what counts.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gpipe.core.balance import CarriedValue, LinearCost
from lightning_gpipe.core.data import FlatTree, bytes_of, tree_flatten
from lightning_gpipe.core.layout import kind_of
from lightning_gpipe.core.profile.counting import LayerCounter, ends_of
from lightning_gpipe.core.profile.meters import Meter
from lightning_gpipe.core.profile.single_layer import Flow, alone, gradients_for, on_its_device
from lightning_gpipe.core.programs import Program, chain
from lightning_gpipe.core.run import Stage

_ALIVE = 2**28  # bytes; more than caches have, and than memory that is freed and soon used again
_OFTEN = 8  # the empty stage is measured after as many layers
_ROUNDS = 2, 9  # with times: at least, at most
_ERROR = 0.03  # of the times, at which there are enough rounds
_SECONDS = 3.0  # in all rounds, after which there is none more if more than the least have run


@dataclass(eq=False)
class Rounds:
    """The measurements of all layers, each of which is a stage.

    The time of ``empty``, a stage without layers, is the overhead, which a stage of several has
    once. ``microbatches`` are by numbers of rows. ``split``: measure backwards in two parts, too.
    """

    program: Program
    microbatches: Mapping[int, Any]
    stages: Sequence[Stage]
    empty: Stage
    device: torch.device
    split: bool

    def __post_init__(self) -> None:
        self.meter = Meter(self.device)
        once = cache(kind_of)
        self._counted = {
            rows: LayerCounter(self.program, self.meter, self.stages, once, split=self.split)
            for rows in self.microbatches
        }
        self._gradients: list[Tensor] = []  # those that are alive
        times = partial(Times, self.meter, self._gradients, split=self.split)
        self._times = {rows: defaultdict[int, Times](times) for rows in self.microbatches}
        self._overhead = times()
        self._nothing = chain([[(nn.Identity(), "nothing")]])

    def run(self) -> None:
        self._round(self._count)
        if self.meter.exact:
            return
        least, most = _ROUNDS
        for number in range(most):
            self._round(partial(self._time, number))
            self._gradients.clear()
            if number + 1 >= least and self._agree(enough=number + 1 > least):
                break

    def costs(self, chunks: int) -> list[dict[str, Any]]:
        fields: list[dict[str, Any]] = []
        for k in range(len(self.stages)):
            by_rows = {rows: self._costs_of(k, rows, chunks) for rows in self.microbatches}
            names = next(iter(by_rows.values()))
            costs: dict[str, Any] = {
                name: LinearCost.through({rows: cost[name] for rows, cost in by_rows.items()})
                for name in names
            }
            fields.append(costs | {"waited": any(c.waited[k] for c in self._counted.values())})
        return fields

    @property
    def output(self) -> LinearCost:
        return LinearCost.through({rows: each.output for rows, each in self._counted.items()})

    @property
    def carried(self) -> tuple[CarriedValue, ...]:
        counted = self._counted.items()
        pairs = dict.fromkeys(ends for _, each in counted for ends in each.sizes)
        return tuple(
            CarriedValue(
                *ends,
                LinearCost.through({rows: each.sizes[ends] for rows, each in counted}),
                LinearCost.through({rows: each.saved[ends] for rows, each in counted}),
            )
            for ends in pairs
        )

    def _round(self, visit: Callable[[Stage, int, Flow], None]) -> None:
        flows = {
            rows: Flow(microbatch, self.program, self.device)
            for rows, microbatch in self.microbatches.items()
        }
        for stage in self.stages:
            for rows, flow in flows.items():
                visit(stage, rows, flow)

    def _count(self, stage: Stage, rows: int, flow: Flow) -> None:
        with on_its_device(stage, rows):
            self._counted[rows].visit(stage, flow)

    def _time(self, number: int, stage: Stage, rows: int, flow: Flow) -> None:
        """Measure a layer if it is its turn in this round among those that are alike."""
        j, counted = stage.partition.index, self._counted[rows]
        arriving, leaving = ends_of(stage, self.program)
        inputs = flow.arriving(j, arriving)
        kind, place = counted.kinds[j]
        if number % counted.alike[kind] == place:
            with on_its_device(stage, rows):
                outputs = self._times[rows][kind].measure(stage, self.program, inputs)
        else:
            outputs = counted.outputs[kind]
        flow.leave(outputs, leaving)
        if j % _OFTEN == 0:
            x = torch.zeros(1, device=self.device, requires_grad=True)
            self._overhead.measure(self.empty, self._nothing, tree_flatten(x))

    def _agree(self, *, enough: bool) -> bool:
        """Return whether the times are known, or have taken too long in ``enough`` rounds."""
        times = [
            (each, self._counted[rows].alike[kind])
            for rows, by_kind in self._times.items()
            for kind, each in by_kind.items()
        ]
        # Layers that are not alike are too slow and too fast independently of one another.
        error = math.hypot(*(number * each.error for each, number in times))
        total = sum(number * median(each.totals) for each, number in times)
        spent = sum(sum(each.totals) for each, _ in times)
        return error <= _ERROR * total or (enough and spent >= _SECONDS)

    def _costs_of(self, k: int, rows: int, chunks: int) -> dict[str, float]:
        counted = self._counted[rows].costs[k]
        if self.meter.exact:
            return counted
        overhead = self._overhead.of(chunks)
        kind, _ = self._counted[rows].kinds[k]
        times = self._times[rows][kind].of(chunks)
        return counted | {name: max(0.0, time - overhead[name]) for name, time in times.items()}


class Times:
    """The times of a stage for micro-batches of one size, in rounds with these ``totals``.

    The ``gradients`` that are alive get those of the stage.
    """

    def __init__(self, meter: Meter, gradients: list[Tensor], *, split: bool) -> None:
        self._meter, self._gradients, self._split = meter, gradients, split
        self._forward: list[float] = []
        self._dropping: list[float] = []
        self.totals: list[float] = []
        # Of backwards or their parts: the first of a mini-batch, and each later one.
        self._backward: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)

    def measure(self, stage: Stage, program: Program, inputs: FlatTree) -> FlatTree:
        """Run F0 F1 R1 B1 B0, or F0 F1 B1 W1 B0 W0 for both parts of backwards; return outputs."""
        meter, pairs = self._meter, {}
        with alone(stage, program, recomputed=[1]) as single:
            outputs, forward = meter(partial(single.forward, 0, inputs.detached()))
            _, dropping = meter(partial(single.forward, 1, inputs.detached()))
            single.recompute(1)
            _, first = meter(partial(single.backward, 1, gradients_for(outputs)))
            _, later = meter(partial(single.backward, 0, gradients_for(outputs)))
            _keep_alive(self._gradients, single.take_gradients())
        self._forward.append(forward)
        self._dropping.append(dropping)
        pairs["backward"] = first, later
        if self._split:
            with alone(stage, program, split=True) as single:
                both = [single.forward(i, inputs.detached()) for i in (0, 1)]
                _, first_inputs = meter(partial(single.backward, 1, gradients_for(both[1])))
                _, first_weights = meter(partial(single.weights, 1))
                _, later_inputs = meter(partial(single.backward, 0, gradients_for(both[0])))
                _, later_weights = meter(partial(single.weights, 0))
                _keep_alive(self._gradients, single.take_gradients())
            pairs |= {
                "inputs": (first_inputs, later_inputs),
                "weights": (first_weights, later_weights),
            }
        for name, pair in pairs.items():
            self._backward[name].append(pair)
        self.totals.append(forward + dropping + sum(map(sum, pairs.values())))
        return outputs

    @property
    def error(self) -> float:
        """The error of the median, estimated: the median deviation over the root of the rounds."""
        middle = median(self.totals)
        deviation = median(abs(total - middle) for total in self.totals)
        return deviation / math.sqrt(len(self.totals))

    def of(self, chunks: int) -> dict[str, float]:
        """Return the mean time of each action in a mini-batch of ``chunks``, by the medians."""
        times = {"forward": median(self._forward), "dropping": median(self._dropping)}
        for name, pairs in self._backward.items():
            first, later = map(median, zip(*pairs, strict=True))
            times[name] = (first + (chunks - 1) * later) / chunks
        return times


def _keep_alive(gradients: list[Tensor], new: list[tuple[Tensor, Tensor]]) -> None:
    """Add the gradients of one more layer, on a CPU only; drop all if they are too large."""
    gradients += [gradient for _, gradient in new if gradient.device.type == "cpu"]
    if sum(map(bytes_of, gradients)) > _ALIVE:
        gradients.clear()
