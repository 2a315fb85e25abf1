"""Runs the layers of a model one by one, round after round, and measures each of them.

In the first round the bytes are counted that layers save and hand on, and on the meta device the
operations. In the others times are measured, see ``times``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

import torch

from lightning_gpipe.core.data import FlatTree, tree_flatten
from lightning_gpipe.core.plan import Carried, PerRow, Program
from lightning_gpipe.core.profile.alone import noted, on_its_device
from lightning_gpipe.core.profile.counting import Counting, ends_of
from lightning_gpipe.core.profile.flow import Flow
from lightning_gpipe.core.profile.meters import Meter, Operations, Seconds
from lightning_gpipe.core.profile.times import Gradients, Times
from lightning_gpipe.core.run import Stage

_OFTEN = 8  # after as many layers the empty stage is measured


class Rounds:
    """The measurements of all layers.

    Args:
        program: What they run, if that is not one after another.
        microbatches: Micro-batches by their number of rows.
        stages: A stage for each layer.
        empty: A stage without layers: what it takes, a stage of several layers takes once.
        device: Where they run.
        split: Whether to measure backwards in two parts, too.

    Attributes:
        meter: What measures.
    """

    def __init__(
        self,
        program: Program | None,
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
        self._overhead, self._gradients = Times(), Gradients()

    def run(self) -> None:
        """Measure all layers."""
        self._round(self._count)
        if self.meter.exact:
            return
        took = [c["forward"] + c["backward"] for each in self._counted.values() for c in each.costs]
        for _ in range(self.meter.repeats(2 * fmean(took))):
            self._round(self._time)
            self._gradients.drop()

    def costs(self, chunks: int) -> list[dict[str, Any]]:
        """For each layer, the fields of its profile in a mini-batch of so many micro-batches."""
        found: list[dict[str, Any]] = []
        for k in range(len(self._stages)):
            by_rows = {rows: self._costs_of(k, rows, chunks) for rows in self._microbatches}
            names = next(iter(by_rows.values()))
            costs: dict[str, Any] = {
                name: PerRow.through({rows: each[name] for rows, each in by_rows.items()})
                for name in names
            }
            found.append(costs | {"waited": any(c.waited[k] for c in self._counted.values())})
        return found

    @property
    def output(self) -> PerRow:
        """The bytes of what the last layer makes."""
        return PerRow.through({rows: each.output for rows, each in self._counted.items()})

    @property
    def carried(self) -> tuple[Carried, ...]:
        """What layers hand to later ones."""
        counted = self._counted.items()
        found = dict.fromkeys(ends for _, each in counted for ends in each.sizes)
        return tuple(
            Carried(
                *ends,
                PerRow.through({rows: each.sizes[ends] for rows, each in counted}),
                PerRow.through({rows: each.saved[ends] for rows, each in counted}),
            )
            for ends in found
        )

    def _round(self, visit: Callable[[Stage, int, Flow], None]) -> None:
        """Visit each layer, in order, with a micro-batch of each size."""
        flows = {
            rows: Flow(each, self._program, self._device)
            for rows, each in self._microbatches.items()
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
                self._empty, None, nothing, self.meter, self._gradients, split=self._split
            )

    def _costs_of(self, k: int, rows: int, chunks: int) -> dict[str, float]:
        """What layer ``k`` costs."""
        counted = self._counted[rows].costs[k]
        if self.meter.exact:
            return counted
        overhead = self._overhead.of(chunks)
        times = self._times[rows][k].of(chunks)
        return counted | {name: max(0.0, time - overhead[name]) for name, time in times.items()}
