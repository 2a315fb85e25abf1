"""The run of one mini-batch: all that surrounds the work of its stages.

A mini-batch with one loss and one with a loss for each micro-batch differ in the order of their
calls. Both enter the same context managers, have random numbers of their own, watch the same
things, and make the same passes and workers: this is here, and both use it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_gpipe.core.data import Division, FlatTree
from lightning_gpipe.core.faithful import (
    NO_VALUES,
    Context,
    Draws,
    LazyManagers,
    LibraryDraws,
    LibraryWatch,
    Manager,
    Randomness,
    RowWatch,
    SharedGenerators,
    Streams,
    TrainingFlags,
    on_engine_thread,
)
from lightning_gpipe.core.layout import Layout
from lightning_gpipe.core.programs import Program
from lightning_gpipe.core.run.backward.leaves import UsedLeaves
from lightning_gpipe.core.run.guards.lost_gradients import LostGradients, UnfinishedMiniBatches
from lightning_gpipe.core.run.observe.threads_or_inline import Execution
from lightning_gpipe.core.run.stage import Stage
from lightning_gpipe.core.run.stage_pass import StagePass
from lightning_gpipe.core.run.work import Work
from lightning_gpipe.core.run.worker import Worker
from lightning_gpipe.core.schedules import Schedule
from lightning_gpipe.core.transport import Transport

_NO_LEAVES = UsedLeaves(())


class Equipment(NamedTuple):
    """The parts of an engine that last from one mini-batch to the next.

    Attributes:
        stages: The stages of this process, in order.
        layout: The layout of the stages.
        transport: Connects the workers.
        draws: Records whether the layers draw random numbers.
        library_draws: Records whether they do so from Python's or NumPy's generator.
        unfinished: Mini-batches whose backward has not run.
        training_flags: Returns the training flags of the stages of all processes.
    """

    stages: Sequence[Stage]
    layout: Layout
    transport: Transport
    draws: Draws
    library_draws: LibraryDraws
    unfinished: UnfinishedMiniBatches
    training_flags: Callable[[], TrainingFlags]


class MiniBatchRun:
    """The run of one mini-batch.

    Attributes:
        context: The same, as recomputation and backward need it.
        streams: The caller's streams.
        shared: The devices whose generator several workers, or a worker and the caller, draw from.
        flags: The training flags of all modules, once it has begun.
        library: Watches the generators of Python and NumPy during forward.
        session: A ``with`` block for each phase, in which no other mini-batch runs.
        passes: The passes through the stages of this process.
        workers: The workers of this process.
    """

    def __init__(
        self, equipment: Equipment, schedule: Schedule, execution: Execution, context: Context
    ) -> None:
        self.equipment = equipment
        self.schedule = schedule
        self.execution = execution
        self.context = context.for_backward(recomputes=schedule.recomputes)
        self.streams = Streams.capture(equipment.layout.devices_here)
        self.shared = equipment.draws.shared
        self.flags: TrainingFlags = b""
        self.library: LibraryWatch | None = None
        self.passes: Sequence[StagePass] = ()
        self.workers: list[Worker] = []
        # Not a method of its own: a cycle would keep what a dropped output has of the mini-batch.
        self.session = LazyManagers(partial(_concerns, equipment.transport, execution))
        self._works: list[Work] = []
        self._watches: list[RowWatch | None] = []
        self._used_leaves = _NO_LEAVES

    def transport_in(self, modes: object) -> Transport:
        """Return the transport; the inline one where threads are slower, or lack modes."""
        transport, inline = self.equipment.transport, self.execution.inline
        return transport.inline() if inline or modes or on_engine_thread() else transport

    def begin(self) -> None:
        """Look at the modules as they are now."""
        for stage in self.equipment.stages:
            stage.refresh()
        self.flags = self.equipment.training_flags()

    def begin_library_watch(self, *, inline: bool) -> LibraryWatch:
        """Watch the generators of Python and NumPy until the end of forward."""
        spread = self.equipment.layout.spread
        self.library = self.equipment.library_draws.begin(
            self.flags,
            alone=inline and not spread,
            recomputed=self.schedule.recomputes,
            spread=spread,
        )
        return self.library

    def begin_work(
        self, program: Program, inputs: FlatTree, division: Callable[[], Division | None]
    ) -> None:
        """Give the stages their parts of a program."""
        self._works = [Work(stage, program) for stage in self.equipment.stages]
        self._watches = [
            stage.watch((self.flags, inputs.spec, work.signature), division)
            if self.schedule.m > 1
            else None
            for stage, work in zip(self.equipment.stages, self._works, strict=True)
        ]

    def begin_passes(
        self,
        generators: SharedGenerators | None,
        *,
        forward: Context | None = None,
        values: Mapping[int, Tensor] = NO_VALUES,
        terms: bool = False,
    ) -> None:
        """Make new passes and workers; again if forward runs again because layers draw.

        Args:
            generators: The shared generators, if private ones are in their place.
            forward: The thread-local state of forwards, if backwards of the phase have another one.
            values: The values of parameters that another process has, by the parameters' ids.
            terms: Whether to collect loss terms.
        """
        self.refuse_gradients()
        layout, context, stages = self.equipment.layout, self.context, self.equipment.stages
        recomputed = [self.schedule.recomputed(stage.partition.index) for stage in stages]
        shadows = [
            stage.shadows(grad=context.grad, recomputed=bool(indices), values=values)
            for stage, indices in zip(stages, recomputed, strict=True)
        ]
        self._used_leaves = UsedLeaves(shadows, spread=layout.spread)
        self.passes = [
            StagePass(
                stage,
                self._works[k],
                context,
                recomputed[k],
                self._randomness(generators, stage),
                shadows[k],
                self._used_leaves,
                self._watches[k],
                terms=terms,
                split=self.schedule.split,
            )
            for k, stage in enumerate(stages)
        ]
        by_stage = {each.stage.partition.index: each for each in self.passes}
        self.workers = [
            Worker(
                w,
                layout.devices[w],
                {j: by_stage[j] for j in layout.stages_of(w)},
                self.streams,
                forward,
            )
            for w in layout.workers_here
        ]

    def finish_forward(self, everywhere: Sequence[nn.Parameter] = ()) -> list[Tensor]:
        """Check what layers did in forward.

        Args:
            everywhere: Parameters of stages of other processes that have values here too.

        Returns:
            The leaves whose gradients backward will compute.
        """
        for stage_pass in self.passes:
            stage_pass.finish_forward()
        return self._used_leaves.leaves(everywhere)

    @property
    def foreign_leaves(self) -> list[Tensor]:
        """The captured leaves that are not parameters of the pipeline."""
        return self._used_leaves.foreign_leaves

    @property
    def lost_gradients(self) -> list[LostGradients]:
        """The watch over the leaves of each pass."""
        return [stage_pass.lost_gradients for stage_pass in self.passes]

    def begin_backward(self, generators: SharedGenerators | None) -> None:
        """Let backward draw, from private generators in the place of the shared ones if any."""
        for stage_pass in self.passes:
            j = stage_pass.stage.partition.index
            private = None if generators is None else generators.private_in_backward(j)
            stage_pass.randomness.begin_backward(private)

    def check(self) -> None:
        """Raise if backward would not be that of what forward computed."""
        for stage_pass in self.passes:
            stage_pass.lost_gradients.check()
            stage_pass.check_unchanged()

    def take_gradients(self) -> list[tuple[int, list[tuple[Tensor, Tensor]]]]:
        """Return the index of each stage with its pairs of a leaf and a gradient."""
        return [(each.stage.partition.index, each.take_gradients()) for each in self.passes]

    def refuse_gradients(self) -> None:
        """Let a gradient raise that arrives in leaves of passes that will have no backward."""
        for stage_pass in self.passes:
            stage_pass.lost_gradients.refuse_gradients()

    def release(self) -> list[LostGradients]:
        """Free everything, also from an error that the user keeps and that may hold this.

        A gradient raises that arrives in a leaf which is alive yet, in a graph that somebody holds.
        """
        self.workers = []  # first, or they would keep the shadows alive
        watches = [stage_pass.release() for stage_pass in self.passes]
        self.passes, self._used_leaves = (), _NO_LEAVES
        for watch in watches:
            watch.refuse_gradients()
        return watches

    def undo(self) -> None:
        """Undo what an interrupted run on this thread has left in the modules."""
        for stage in self.equipment.stages:
            stage.journal.undo()

    def _randomness(self, generators: SharedGenerators | None, stage: Stage) -> Randomness:
        devices = {torch.device("cpu"), stage.device} - self.shared
        private = None
        if generators is not None:
            private = generators.private(stage.partition.index, grad=self.context.grad)
        libraries = self.library is not None and self.library.saved
        return Randomness(devices, private, libraries=libraries)


def _concerns(transport: Transport, execution: Execution) -> Iterable[Manager]:
    """The context managers of a phase, in order."""
    return transport.exclusive(), execution.timed
