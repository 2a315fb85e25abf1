"""Runs the layers of a model one by one, round after round, and measures each of them.

The first round counts bytes, and on the meta device operations; the others measure times as a
mini-batch has them. A layer that runs repeatedly finds its parameters in the cache, and its
gradients in memory that is in use; in a mini-batch other layers run in between. So each layer is
measured once in a round, and the gradients of several layers are alive at once. If the machine is
slow for a moment, that is one measurement of many layers, which medians leave out. Of layers that
are alike a round measures one. There are as many rounds for each size of micro-batches as it takes
until the sum over the layers is known: a stage of many layers is what counts.
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
_SECONDS = 3.0  # in the rounds of a size, after which there is none if more than the least ran


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
        self._sizes = sorted(self.microbatches, reverse=True)
        once = cache(kind_of)
        self._counted: dict[int, LayerCounter] = {}
        fewer: LayerCounter | None = None
        for rows in reversed(self._sizes):
            self._counted[rows] = LayerCounter(
                self.program, self.meter, self.stages, once, fewer, split=self.split
            )
            if not self.meter.exact:  # or operations differ where bytes do not
                fewer = self._counted[rows]
        self._gradients: list[Tensor] = []  # those that are alive
        times = partial(Times, self.meter, self._gradients, split=self.split)
        self._fewest = self._sizes[-1]
        self._times = {
            rows: defaultdict[int, Times](partial(times, twice=rows == self._fewest))
            for rows in self._sizes
        }
        self._overhead = times(twice=True)
        self._nothing = chain([[(nn.Identity(), "nothing")]])

    def run(self) -> None:
        self._round(self._count, self._sizes[::-1])  # each tells what is alike with more rows
        sizes = [] if self.meter.exact else self._sizes
        least, most = _ROUNDS
        for number in range(most):
            if not sizes:
                break
            self._round(partial(self._time, number), sizes)
            self._gradients.clear()
            if number + 1 >= least:
                enough = number + 1 > least
                sizes = [rows for rows in sizes if not self._is_known(rows, enough=enough)]

    def costs(self, rows: int, chunks: int) -> list[dict[str, Any]]:
        """Return the costs of each layer in a mini-batch of so many micro-batches of ``rows``."""
        fields: list[dict[str, Any]] = []
        for k in range(len(self.stages)):
            by_rows = {each: self._costs_of(k, each, chunks) for each in self._through(rows)}
            names = next(iter(by_rows.values()))
            costs: dict[str, Any] = {
                name: LinearCost.through({each: cost[name] for each, cost in by_rows.items()})
                for name in names
            }
            fields.append(costs | {"waited": any(c.waited[k] for c in self._counted.values())})
        return fields

    def output(self, rows: int) -> LinearCost:
        return LinearCost.through(
            {each: self._counted[each].output for each in self._through(rows)}
        )

    def carried(self, rows: int) -> tuple[CarriedValue, ...]:
        counted = {each: self._counted[each] for each in self._through(rows)}
        pairs = dict.fromkeys(ends for each in counted.values() for ends in each.sizes)
        return tuple(
            CarriedValue(
                *ends,
                LinearCost.through({n: each.sizes[ends] for n, each in counted.items()}),
                LinearCost.through({n: each.saved[ends] for n, each in counted.items()}),
            )
            for ends in pairs
        )

    def _through(self, rows: int) -> list[int]:
        """Return ``rows`` and the next smaller size: costs are linear between the two."""
        return [each for each in self._sizes if each <= rows][:2]

    def _round(self, visit: Callable[[Stage, int, Flow], None], sizes: Sequence[int]) -> None:
        flows = {rows: Flow(self.microbatches[rows], self.program, self.device) for rows in sizes}
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

    def _is_known(self, rows: int, *, enough: bool) -> bool:
        """Return whether the times of a size agree, or have taken too long in ``enough`` rounds."""
        alike = self._counted[rows].alike
        times = [(each, alike[kind]) for kind, each in self._times[rows].items()]
        # Layers that are not alike are too slow and too fast independently of one another.
        error = math.hypot(*(number * each.error for each, number in times))
        total = sum(number * median(each.totals) for each, number in times)
        spent = sum(sum(each.totals) for each, _ in times)
        return error <= _ERROR * total or (enough and spent >= _SECONDS)

    def _costs_of(self, k: int, rows: int, chunks: int) -> dict[str, float]:
        counted = self._counted[rows].costs[k]
        if self.meter.exact:
            return counted
        later = (chunks - 1) / chunks
        overhead = self._overhead.of(later)
        kind, _ = self._counted[rows].kinds[k]
        fewest, _ = self._counted[self._fewest].kinds[k]
        times = self._times[rows][kind].of(later, self._times[self._fewest][fewest])
        return counted | {name: max(0.0, time - overhead[name]) for name, time in times.items()}


class Times:
    """The times of a stage for micro-batches of one size, in rounds with these ``totals``.

    The ``gradients`` that are alive get those of the stage. A first backward makes gradients, to
    which each later one adds its own: ``twice`` measures both.
    """

    def __init__(self, meter: Meter, gradients: list[Tensor], *, split: bool, twice: bool) -> None:
        self._meter, self._gradients = meter, gradients
        self._split, self._twice = split, twice
        self._forward: list[float] = []
        self._dropping: list[float] = []
        self.totals: list[float] = []
        # Of backwards or their parts: the first of a mini-batch and, measured twice, a later one.
        self._backward: defaultdict[str, list[list[float]]] = defaultdict(list)

    def measure(self, stage: Stage, program: Program, inputs: FlatTree) -> FlatTree:
        """Run F0 F1 B0, or ``twice`` F0 F1 R1 B1 B0; then backwards in parts; return outputs."""
        meter, order = self._meter, (1, 0) if self._twice else (0,)
        times: defaultdict[str, list[float]] = defaultdict(list)
        with alone(stage, program, recomputed=[1]) as single:
            outputs, forward = meter(partial(single.forward, 0, inputs.detached()))
            _, dropping = meter(partial(single.forward, 1, inputs.detached()))
            if self._twice:
                single.recompute(1)
            for i in order:
                _, seconds = meter(partial(single.backward, i, gradients_for(outputs)))
                times["backward"].append(seconds)
            _keep_alive(self._gradients, single.take_gradients())
        if self._split:
            with alone(stage, program, split=True) as single:
                own = {i: single.forward(i, inputs.detached()) for i in sorted(order)}
                for i in order:
                    _, seconds = meter(partial(single.backward, i, gradients_for(own.pop(i))))
                    times["inputs"].append(seconds)
                    _, seconds = meter(partial(single.weights, i))
                    times["weights"].append(seconds)
                _keep_alive(self._gradients, single.take_gradients())
        self._forward.append(forward)
        self._dropping.append(dropping)
        for name, found in times.items():
            self._backward[name].append(found)
        self.totals.append(forward + dropping + sum(map(sum, times.values())))
        return outputs

    @property
    def error(self) -> float:
        """The error of the median, estimated: the median deviation over the root of the rounds."""
        middle = median(self.totals)
        deviation = median(abs(total - middle) for total in self.totals)
        return deviation / math.sqrt(len(self.totals))

    def of(self, later: float, twice: Times | None = None) -> dict[str, float]:
        """Return the mean time of each action if a share of backwards adds to gradients.

        To add takes as long for micro-batches of any size: the times of one measured it ``twice``.
        """
        times = {"forward": median(self._forward), "dropping": median(self._dropping)}
        for name in self._backward:
            first, *_ = self._medians(name)
            before, after = (twice or self)._medians(name)
            times[name] = first + later * (after - before)
        return times

    def _medians(self, name: str) -> list[float]:
        return list(map(median, zip(*self._backward[name], strict=True)))


def _keep_alive(gradients: list[Tensor], new: list[tuple[Tensor, Tensor]]) -> None:
    """Add the gradients of one more layer, on a CPU only; drop all if they are too large."""
    gradients += [gradient for _, gradient in new if gradient.device.type == "cpu"]
    if sum(map(bytes_of, gradients)) > _ALIVE:
        gradients.clear()
