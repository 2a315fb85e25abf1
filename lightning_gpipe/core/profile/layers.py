"""Measures what layers cost, one by one.

Each layer is a stage of its own for the time of its measurement, and runs as the engine runs
stages: on shadows of its parameters, so that no gradient and no hook on a parameter is touched, and
on copies of its buffers. The copies are on the device that is to be measured, those of one layer at
a time, so that the model may be larger than the device, and need not be there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gpipe.core.data import FlatTree, tree_flatten
from lightning_gpipe.core.faithful import Write, add_note, preserved
from lightning_gpipe.core.plan import (
    Carried,
    ModelProfile,
    Partition,
    PerRow,
    Program,
    Route,
    lay_out,
)
from lightning_gpipe.core.profile.alike import Alike
from lightning_gpipe.core.profile.flow import Flow
from lightning_gpipe.core.profile.holding import held_by
from lightning_gpipe.core.profile.meters import Meter, Operations, Seconds
from lightning_gpipe.core.profile.optimizers import Optimizers, optimizer_bytes
from lightning_gpipe.core.profile.saved import SavedBytes
from lightning_gpipe.core.run import Stage, StagePass, pass_alone
from lightning_gpipe.core.skip import routes_of, skips_of, using_table

_MOST = 25  # measurements of one layer


@dataclass(frozen=True)
class Subject:
    """What is profiled.

    Attributes:
        root: The user's model.
        layers: A partition for each layer.
        names: What to call each of them.
        beside: What is profiled of the model besides, and so is not around these layers.
        program: What they run, if that is not one after another.
        microbatches: A micro-batch by its number of rows: the largest of the mini-batch and, to
            tell the costs of rows from others, a smaller one.
        chunks: The number of micro-batches of the mini-batch.
    """

    root: nn.Module
    layers: Sequence[Partition]
    names: Sequence[str]
    beside: Sequence[nn.Module]
    program: Program | None
    microbatches: Mapping[int, Any]
    chunks: int


def profile_layers(
    subject: Subject, device: torch.device, optimizer: Optimizers = None
) -> ModelProfile:
    """Measure what each layer costs.

    The layers run in their training mode, in the caller's autocast. Parameters, gradients, buffers,
    attributes of layers and random generators are the same afterwards.

    Args:
        subject: What is profiled.
        device: Where the layers run; on the meta device operations are counted and nothing is
            computed.
        optimizer: As for :func:`~.optimizers.optimizer_bytes`.

    Raises:
        TypeError, ValueError: If the optimizer is none.
        BaseException: What a layer raises, with a note of where.
    """
    stages = _stages(subject.layers, device)
    modules = [module for stage in stages for module in stage.modules]
    kept = optimizer_bytes(subject.root.parameters(), optimizer)
    measured = _Measured(subject, stages, device)
    with preserved(modules, [device]), torch.enable_grad():
        measured.run()
    held = held_by(
        subject.root,
        [each.layers for each in subject.layers],
        subject.names,
        subject.beside,
        kept,
    )
    return ModelProfile(
        tuple(
            replace(held[stage.partition.index], **costs)
            for stage, costs in zip(stages, measured.costs, strict=True)
        ),
        tuple(measured.carried),
        held[-1],
        max(subject.microbatches),
        subject.chunks,
        measured.meter.unit,
        str(device),
    )


class _Measured:
    """The measurements of all layers.

    Attributes:
        meter: What measures.
        costs: For each layer, the fields of its profile that were measured.
        carried: What layers hand to later ones.
    """

    def __init__(self, subject: Subject, stages: Sequence[Stage], device: torch.device) -> None:
        self.meter: Meter = Operations() if device.type == "meta" else Seconds(device)
        self.costs: list[dict[str, Any]] = []
        self.carried: list[Carried] = []
        self._program = subject.program
        self._stages = stages
        self._saved = {rows: SavedBytes() for rows in subject.microbatches}
        self._flows = {
            rows: Flow(each, subject.program, device) for rows, each in subject.microbatches.items()
        }
        self._alike = {saved: Alike() for saved in self._saved.values()}
        self._overhead = _overhead(device, self.meter)

    def run(self) -> None:
        """Measure all layers, in order."""
        for stage in self._stages:
            found = {}
            for rows, flow in self._flows.items():
                with _on_its_device(stage), _noted(stage, rows):
                    found[rows] = self._measure(stage, flow, self._saved[rows])
            names = next(iter(found.values()))
            self.costs.append(
                {
                    name: PerRow.through({rows: each[name] for rows, each in found.items()})
                    for name in names
                }
            )
            self._add_carried(stage)

    def _measure(self, stage: Stage, flow: Flow, saved: SavedBytes) -> dict[str, float]:
        """What one layer costs for one micro-batch, and what it makes of it."""
        inputs = flow.arriving(stage.partition.index, self._arriving(stage))
        measure = partial(self._run, stage, inputs, saved)
        if self.meter.exact:
            j = stage.partition.index
            part = None if self._program is None else self._program.parts[j]
            costs, outputs = self._alike[saved].count(stage, part, inputs, saved, measure)
        else:
            costs, outputs = measure()
        flow.leave(outputs, self._leaving(stage))
        saved.keep(flow.leaves)
        return costs

    def _run(
        self, stage: Stage, inputs: FlatTree, saved: SavedBytes
    ) -> tuple[dict[str, float], FlatTree]:
        """Run one layer; returns what it costs, and what it makes."""
        times = {} if self.meter.exact else _times(stage, self._program, inputs, self.meter)
        if self.meter.exact:
            with _alone(stage, self._program) as alone:
                alone.forward(0, inputs.detached())
        # Not the first run: in that a stage copies all its inputs.
        with saved.counting(), _alone(stage, self._program) as alone:
            saved.ignore(_tensors_in(stage))
            outputs, forward = self.meter(partial(alone.forward, 0, inputs.detached()))
            _, backward = self.meter(partial(alone.backward, 0, _gradients_for(outputs)))
        times = times or {"forward": forward, "dropping": forward, "backward": backward}
        return {
            "saved": saved.number,
            **{name: max(0.0, time - self._overhead[name]) for name, time in times.items()},
        }, outputs

    def _arriving(self, stage: Stage) -> tuple[Route, ...]:
        if self._program is None:
            return stage.arriving
        return (*stage.arriving, *self._program.parts[stage.partition.index].arriving)

    def _leaving(self, stage: Stage) -> tuple[Route, ...]:
        if self._program is None:
            return stage.leaving
        return (*stage.leaving, *self._program.parts[stage.partition.index].leaving)

    def _add_carried(self, stage: Stage) -> None:
        """Add what a layer has made for later ones."""
        j, n = stage.partition.index, len(self._stages)
        sizes: dict[int, dict[int, float]] = {}
        for rows, flow in self._flows.items():
            for user, size in flow.sizes(j, n, self._leaving(stage)):
                of_user = sizes.setdefault(user, {})
                of_user[rows] = of_user.get(rows, 0.0) + size
        self.carried += [Carried(j, user, PerRow.through(each)) for user, each in sizes.items()]


def _times(
    stage: Stage, program: Program | None, inputs: FlatTree, meter: Meter
) -> dict[str, float]:
    """The times of a stage for one micro-batch: the medians of several runs."""
    runs: dict[str, list[float]] = {"forward": [], "dropping": [], "backward": []}
    odd = range(1, 2 * _MOST + 2, 2)
    with _alone(stage, program, odd) as alone:
        i, repeats = 0, 1
        while i < 2 * repeats:
            dropped = i in odd
            outputs, time = meter(partial(alone.forward, i, inputs.detached()))
            runs["dropping" if dropped else "forward"].append(time)
            if dropped:
                alone.recompute(i)
            _, time = meter(partial(alone.backward, i, _gradients_for(outputs)))
            runs["backward"].append(time)
            i += 1
            if i == 2 and not meter.exact:  # they were to warm up
                repeats = 1 + min(_MOST, meter.repeats(sum(map(sum, runs.values()))))
                runs = {name: [] for name in runs}
    return {name: median(times) for name, times in runs.items()}


def _overhead(device: torch.device, meter: Meter) -> dict[str, float]:
    """What it takes to run a stage without layers: a stage of several layers has it once."""
    layer = Partition(0, 0, (nn.Identity(),))
    (stage,) = _stages([layer], device)
    x = torch.zeros(1, device=device, requires_grad=True)
    return _times(stage, None, FlatTree(*tree_flatten(x)), meter)


@contextmanager
def _alone(
    stage: Stage, program: Program | None, recomputed: Collection[int] = ()
) -> Iterator[StagePass]:
    """A stage that runs by itself in a ``with`` block."""
    alone = pass_alone(stage, program, recomputed=recomputed)
    with alone.shadows.swapped_in(stage.journal), using_table({}):
        yield alone
    alone.take_gradients()
    alone.release()


@contextmanager
def _on_its_device(stage: Stage) -> Iterator[None]:
    """Let a stage have copies of its buffers on its device in a ``with`` block."""
    copies: dict[Tensor, Tensor] = {}
    writes: list[Write] = []
    for module in stage.modules:
        for name, buffer in module._buffers.items():
            if buffer is not None:
                if buffer not in copies:
                    copies[buffer] = buffer.detach().to(stage.device, copy=True)
                writes.append((module._buffers, name, copies[buffer]))
    cuda = stage.device.type == "cuda"
    with stage.journal.changed(writes), torch.cuda.device(stage.device) if cuda else nullcontext():
        yield


@contextmanager
def _noted(stage: Stage, rows: int) -> Iterator[None]:
    """Add a note to an error that a layer raises."""
    try:
        yield
    except Exception as error:
        names = ", ".join(title for _, title in stage.titled) or str(stage.partition)
        add_note(
            error,
            f"raised in {names}, which ran by itself on a micro-batch of {rows} rows, on "
            f"{stage.device}, to measure what it costs. Pass an input that the model takes, or "
            "choose a balance that needs no measurement: a list, or 'parameters'.",
        )
        raise


def _stages(partitions: Sequence[Partition], device: torch.device) -> list[Stage]:
    """A stage for each layer, which follows parameters that are on another device."""
    layers = [layer for partition in partitions for layer in partition.layers]
    routes = routes_of(skips_of(layers, partitions), partitions)
    layout = lay_out(partitions, [device], routes)
    found = {parameter: parameter.device for parameter in layout.homes}
    layout = layout.with_homes(found)
    return [Stage(layout, j, deferred_batch_norm=True) for j in range(layout.n)]


def _gradients_for(outputs: FlatTree) -> FlatTree:
    """A gradient for each output that requires one."""
    needed = (isinstance(leaf, Tensor) and leaf.requires_grad for leaf in outputs.leaves)
    return FlatTree(
        [
            torch.ones_like(leaf) if needs else None
            for leaf, needs in zip(outputs.leaves, needed, strict=True)
        ],
        outputs.spec,
    )


def _tensors_in(stage: Stage) -> Iterator[Tensor]:
    """The parameters and buffers that a stage has now."""
    for module in stage.modules:
        for slots in (module._parameters, module._buffers):
            yield from (each for each in slots.values() if each is not None)
