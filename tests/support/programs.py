"""Runs hand-made programs in the engine, and plainly: step after step on the whole values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from lightning_gpipe.core.data import (
    FlatTree,
    Rows,
    Term,
    join,
    parted,
    tree_flatten,
    tree_unflatten,
)
from lightning_gpipe.core.layout import Partition, lay_out
from lightning_gpipe.core.pipeline import Pipeline
from lightning_gpipe.core.pipeline.choose.options import Resolved
from lightning_gpipe.core.programs import Program, Route, Step, Value
from lightning_gpipe.core.run import Engine
from lightning_gpipe.core.schedules import (
    FILL_DRAIN,
    ActivationCheckpointing,
    fill_drain,
    recomputed_by_stage,
)
from lightning_gpipe.core.transport import InlineTransport, LocalTransport, Workers
from tests.support.pipes import M


class Running:
    """An engine whose stages have these modules, and what a facade would do around it."""

    def __init__(
        self,
        stages: Sequence[Sequence[nn.Module]],
        devices: Sequence[str] = ("cpu",),
        *,
        routes: Sequence[Route] = (),
        mode: ActivationCheckpointing = "except_last",
        threads: bool = True,
    ) -> None:
        partitions, first = [], 0
        for j, modules in enumerate(stages):
            names = tuple(f"blocks.{first + k}" for k in range(len(modules)))
            partitions.append(Partition(j, first, tuple(modules), names))
            first += len(modules)
        layout = lay_out(partitions, [torch.device(each) for each in devices], routes)
        for j, partition in enumerate(partitions):
            for module in partition.layers:
                module.to(layout.device_of(j))
        several = threads and len(devices) > 1
        self.engine = Engine(layout, LocalTransport(layout) if several else InlineTransport(layout))
        self.terms: list[list[Term]] = []
        self._mode = mode

    def __call__(
        self,
        program: Program,
        values: Sequence[Any],
        chunks: int | None = None,
        *,
        terms: bool = False,
    ) -> list[Any]:
        """Run the program in micro-batches, and merge its outputs."""
        rows = Rows()
        pieces = rows.split(list(values), chunks or M)
        microbatches = [join(list(map(tree_flatten, piece))) for piece in pieces]
        m = len(microbatches)
        placement = self.engine.layout.placement
        mode = self._mode if torch.is_grad_enabled() else "never"
        recomputed = recomputed_by_stage(mode, m, len(placement))
        schedule = fill_drain(m, placement, recomputed=recomputed)
        outputs, self.terms = self.engine.run(microbatches, schedule, program, terms=terms)
        merged: list[Any] = rows.merge([values_of(program, each) for each in outputs], list(values))
        return merged

    def close(self) -> None:
        """End the threads."""
        self.engine.close()


def pipeline_of(
    partitions: Sequence[Partition], mode: ActivationCheckpointing = "except_last"
) -> Pipeline:
    """A pipeline of three micro-batches on one device, to run programs."""
    layout = lay_out(partitions, [torch.device("cpu")])
    return Pipeline(
        layout,
        Resolved([], 3, mode, FILL_DRAIN),
        microbatching=Rows(),
        deferred_batch_norm=True,
        threads=False,
        cores=None,
        workers=Workers(layout),
    )


def values_of(program: Program, output: FlatTree) -> list[Any]:
    """The values of the program's outputs in that of a micro-batch."""
    return list(map(tree_unflatten, parted(output, len(program.outputs))))


def plainly(
    steps: Sequence[Step], inputs: Sequence[int], outputs: Sequence[int], values: Sequence[Any]
) -> list[Any]:
    """What the steps make of the values."""
    known = dict(zip(inputs, values, strict=True))
    for each in steps:
        known[each.value] = each(known)
    return [known[number] for number in outputs]


class Made:
    """Makes runnings, and closes them all at the end of the test."""

    def __init__(self, mode: ActivationCheckpointing, threads: bool) -> None:
        self._mode = mode
        self._threads = threads
        self._made: list[Running] = []

    def __call__(
        self,
        *stages: Sequence[nn.Module],
        devices: Sequence[str] | None = None,
        routes: Sequence[Route] = (),
    ) -> Running:
        """A running with these modules on its stages, each on a worker of its own."""
        devices = devices or ["cpu"] * len(stages)
        made = Running(stages, devices, routes=routes, mode=self._mode, threads=self._threads)
        self._made.append(made)
        return made

    def close(self) -> None:
        """Close what was made."""
        for each in self._made:
            each.close()


@pytest.fixture
def running(mode: ActivationCheckpointing, threads: bool) -> Iterator[Made]:
    """The factory of the test's engines that run programs."""
    made = Made(mode, threads)
    yield made
    made.close()


def call(run: Any, value: int, stage: int, *args: Any, **kwargs: Any) -> Step:
    """A step; ints among its arguments are the numbers of values."""
    name = kwargs.pop("name", "") or getattr(run, "__name__", "block")
    line = kwargs.pop("line", "")

    def filled(x: Any) -> Any:
        return Value(x) if type(x) is int else x

    return Step(
        run,
        tuple(map(filled, args)),
        value,
        stage,
        {key: filled(x) for key, x in kwargs.items()},
        name,
        line,
    )
