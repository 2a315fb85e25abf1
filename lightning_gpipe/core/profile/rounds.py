"""Runs the layers of a model one by one, round after round, and measures each of them.

The first round counts the bytes that layers save and hand on, and on the meta device the
operations. The others measure times, see ``times``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gpipe.core.balance import CarriedValue, LinearCost
from lightning_gpipe.core.data import FlatTree, tree_flatten
from lightning_gpipe.core.profile.counting import Counting, ends_of
from lightning_gpipe.core.profile.flow import Flow
from lightning_gpipe.core.profile.meters import Meter, Operations, Seconds
from lightning_gpipe.core.profile.single_layer import noted, on_its_device
from lightning_gpipe.core.profile.times import Times
from lightning_gpipe.core.programs import Program, chain
from lightning_gpipe.core.run import Stage

_OFTEN = 8  # the empty stage is measured after as many layers
_ROUNDS = 3, 9  # with times: at least, at most
_ENOUGH = 0.05  # seconds; faster layers are measured in more rounds


class Rounds:
    """The measurements of all layers, each of which is a stage.

    Args:
        microbatches: Micro-batches by their number of rows.
        empty: A stage without layers: its time is the overhead, which a stage of several layers has
            once.
        split: Whether to measure backwards in two parts, too.

    Attributes:
        meter: Measures seconds, or counts operations.
    """

    def __init__(
        self,
        program: Program,
        microbatches: Mapping[int, Any],
        stages: Sequence[Stage],
        empty: Stage,
        device: torch.device,
        *,
        split: bool = False,
    ) -> None:
        self.meter: Meter = Operations() if device.type == "meta" else Seconds(device)
        self._program, self._microbatches = program, microbatches
        self._stages, self._empty, self._device, self._split = stages, empty, device, split
        self._counted = {rows: Counting(program, self.meter, split=split) for rows in microbatches}
        self._times = {rows: [Times() for _ in stages] for rows in microbatches}
        self._overhead = Times()
        self._gradients: list[Tensor] = []  # those that are alive
        self._nothing = chain([[(nn.Identity(), "nothing")]])

    def run(self) -> None:
        """Measure all layers."""
        self._round(self._count)
        if self.meter.exact:
            return
        counted = self._counted.values()
        seconds = 2 * fmean(c["forward"] + c["backward"] for each in counted for c in each.costs)
        least, most = _ROUNDS
        for _ in range(max(least, min(most, int(_ENOUGH / max(seconds, 1e-9))))):
            self._round(self._time)
            self._gradients.clear()

    def costs(self, chunks: int) -> list[dict[str, Any]]:
        """Return the fields of each layer's profile in a mini-batch of ``chunks`` micro-batches."""
        fields: list[dict[str, Any]] = []
        for k in range(len(self._stages)):
            by_rows = {rows: self._costs_of(k, rows, chunks) for rows in self._microbatches}
            names = next(iter(by_rows.values()))
            costs: dict[str, Any] = {
                name: LinearCost.through({rows: cost[name] for rows, cost in by_rows.items()})
                for name in names
            }
            fields.append(costs | {"waited": any(c.waited[k] for c in self._counted.values())})
        return fields

    @property
    def output(self) -> LinearCost:
        """The bytes of the outputs of the last layer."""
        return LinearCost.through({rows: each.output for rows, each in self._counted.items()})

    @property
    def carried(self) -> tuple[CarriedValue, ...]:
        """The values that layers hand to later ones."""
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
        """Visit each layer, in order, with a micro-batch of each size."""
        flows = {
            rows: Flow(microbatch, self._program, self._device)
            for rows, microbatch in self._microbatches.items()
        }
        for stage in self._stages:
            for rows, flow in flows.items():
                with on_its_device(stage), noted(stage, rows):
                    visit(stage, rows, flow)

    def _count(self, stage: Stage, rows: int, flow: Flow) -> None:
        self._counted[rows].visit(stage, flow, len(self._stages) - 1)

    def _time(self, stage: Stage, rows: int, flow: Flow) -> None:
        j = stage.partition.index
        arriving, leaving = ends_of(stage, self._program)
        outputs = self._times[rows][j].measure(
            stage,
            self._program,
            flow.arriving(j, arriving),
            self.meter,
            self._gradients,
            split=self._split,
        )
        flow.leave(outputs, leaving)
        if j % _OFTEN == 0:
            x = torch.zeros(1, device=self._device, requires_grad=True)
            nothing = FlatTree(*tree_flatten(x))
            self._overhead.measure(
                self._empty, self._nothing, nothing, self.meter, self._gradients, split=self._split
            )

    def _costs_of(self, k: int, rows: int, chunks: int) -> dict[str, float]:
        counted = self._counted[rows].costs[k]
        if self.meter.exact:
            return counted
        overhead = self._overhead.of(chunks)
        times = self._times[rows][k].of(chunks)
        return counted | {name: max(0.0, time - overhead[name]) for name, time in times.items()}
