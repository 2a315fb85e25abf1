"""The run of one mini-batch: all that surrounds the work of its stages.

A mini-batch with one loss and one with a loss for each micro-batch differ in the order of their
calls. Both have the same context managers, random numbers, watches, passes and workers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_gpipe.core.data import Division, FlatTree
from lightning_gpipe.core.faithful import (
    Context,
    LibraryDraws,
    LibraryWatch,
    Manager,
    RandomDraws,
    Randomness,
    RowWatch,
    SharedGenerators,
    Streams,
    on_engine_thread,
    together,
)
from lightning_gpipe.core.layout import Layout
from lightning_gpipe.core.programs import Program
from lightning_gpipe.core.run.agreement import NO_GENERATORS, Agreement
from lightning_gpipe.core.run.backward.leaves import UsedLeaves
from lightning_gpipe.core.run.backward.sums import Pair
from lightning_gpipe.core.run.gradient_home import GradientHome, GradientTransfer
from lightning_gpipe.core.run.guards.lost_gradients import LostGradients, UnfinishedMiniBatches
from lightning_gpipe.core.run.guards.shared_objects import warn_of_edited_inputs
from lightning_gpipe.core.run.observe.clocks import clock_of
from lightning_gpipe.core.run.observe.threads_or_inline import Execution
from lightning_gpipe.core.run.observe.timeline import Timeline
from lightning_gpipe.core.run.stage import Stage
from lightning_gpipe.core.run.stage_pass import StagePass
from lightning_gpipe.core.run.work import Work
from lightning_gpipe.core.run.worker import HostWorkerTask, WorkerTask
from lightning_gpipe.core.schedules import Schedule
from lightning_gpipe.core.transport import Exchange, Label, Transport

_NO_LEAVES = UsedLeaves(())


class Equipment(NamedTuple):
    """The parts of an engine that last from one mini-batch to the next.

    Attributes:
        unfinished: Mini-batches whose backward has not run.
        workers_with_visits: The workers with something on their device only around its use.
        home: The home of the stages' gradients; None if they stay in this process.
    """

    stages: Sequence[Stage]
    layout: Layout
    transport: Transport
    draws: RandomDraws
    library_draws: LibraryDraws
    unfinished: UnfinishedMiniBatches
    training_flags: Callable[[], bytes]
    workers_with_visits: frozenset[int]
    home: GradientHome | None = None


class MiniBatchRun:
    """The part of a mini-batch that both kinds of losses share.

    Attributes:
        shared: The devices whose generator several workers, or a worker and the caller, draw from.
        inline: Whether the caller's thread runs the phase.
        by_caller: Returns whether the calling code is the caller's, if it runs during the phase.
        transfer: Sends the stages' gradients home; None if they stay in this process.
        outer: The stages in a backward of another mini-batch, within which this one runs.
    """

    timeline: Timeline
    transfer: GradientTransfer | None = None
    outer: Sequence[Stage] = ()

    def __init__(
        self,
        equipment: Equipment,
        schedule: Schedule,
        execution: Execution,
        context: Context,
        label: Label,
    ) -> None:
        self.equipment = equipment
        self.schedule = schedule
        self.execution = execution
        self.context = context.for_backward(recomputes=schedule.recomputes)
        self.streams = Streams.capture(equipment.layout.devices_here)
        self.transport = equipment.transport
        self.inline = False
        self.shared = equipment.draws.shared
        self.flags: bytes = b""
        self.by_caller: Callable[[], bool] | None = None
        self.passes: Sequence[StagePass] = ()
        self._works: list[tuple[Work, RowWatch | None]] = []
        self.used_leaves = _NO_LEAVES
        self.agreement = Agreement(equipment.layout, schedule, label)

    def session(self) -> Manager:
        """Return a ``with`` block for a phase, in which no other mini-batch runs."""
        return together([self.equipment.transport.exclusive(), self.execution.timed])

    def choose_transport(self, modes: object) -> None:
        """Choose the transport of a phase: inline where threads are slower, or lack ``modes``."""
        transport, inline = self.equipment.transport, self.execution.inline
        chosen = transport.inline() if inline or modes or on_engine_thread() else transport
        self.transport, self.inline = chosen, chosen is transport.inline()

    def begin(self) -> None:
        """Read the present modules and training flags of the stages."""
        for stage in self.equipment.stages:
            stage.refresh()
        self.flags = self.equipment.training_flags()

    def begin_library_watch(self) -> LibraryWatch:
        spread = self.equipment.layout.spread
        library = self.agreement.library = self.equipment.library_draws.begin(
            # Steps that end elsewhere are counted apart: those that verify them do not.
            self.flags + b"last" * (spread and self.agreement.at_last),
            alone=self.inline and not spread,
            recomputed=self.schedule.recomputes,
            spread=spread,
        )
        return library

    def generators_now(self, but_for: tuple[bytes, ...] | None = None) -> SharedGenerators:
        return SharedGenerators(self.shared, but_for=but_for) if self.shared else NO_GENERATORS

    def begin_work(
        self,
        program: Program,
        inputs: FlatTree,
        division: Callable[[], Division | None],
        *,
        terms: bool,
    ) -> None:
        """Give the stages their parts of a program; with ``terms`` they collect loss terms."""
        stages = self.equipment.stages
        self._works = self.works_of(stages, program, inputs, division, terms=terms)

    def works_of(
        self,
        stages: Iterable[Stage],
        program: Program,
        inputs: FlatTree,
        division: Callable[[], Division | None],
        *,
        terms: bool,
    ) -> list[tuple[Work, RowWatch | None]]:
        """Return the parts of stages, each with what notices in it layers that mix rows."""
        dims = tuple(leaf.dim() for leaf in inputs.leaves if isinstance(leaf, Tensor))
        works: list[tuple[Work, RowWatch | None]] = []
        for stage in stages:
            work, watch = Work(stage, program, terms=terms), None
            if self.schedule.m > 1 and stage.partition.index in program.stages:
                if stage.embeddings and self.context.grad:
                    stage.check_frequencies(self.schedule.m)
                of_call = self.flags, inputs.spec, dims, work.signature
                watch = stage.watches.begin(of_call, division)
            works.append((work, watch))
        return works

    def begin_passes(
        self, generators: SharedGenerators | None, values: Mapping[int, Tensor] | None
    ) -> None:
        """Make new passes; again if forward runs again because layers draw.

        ``generators`` are the shared ones, if private ones are in their place; ``values`` those of
        parameters that another process has, by the parameters' ids.
        """
        self.refuse_gradients()
        layout, context, stages = self.equipment.layout, self.context, self.equipment.stages
        recomputed = [self.schedule.recomputed(stage.partition.index) for stage in stages]
        shadows = [
            stage.shadows(
                grad=context.grad,
                recomputed=bool(indices),
                values=values,
                by_caller=self.by_caller,
            )
            for stage, indices in zip(stages, recomputed, strict=True)
        ]
        self.used_leaves = UsedLeaves(shadows, spread=layout.spread)
        self.passes = [
            StagePass(
                stage,
                self._works[k][0],
                context,
                recomputed[k],
                self._randomness(generators, stage),
                shadows[k],
                self.used_leaves,
                self._works[k][1],
                split=self.schedule.split,
            )
            for k, stage in enumerate(stages)
        ]

    def begin_timeline(self, *, caller: bool = False) -> None:
        """Begin the record; with ``caller``, the caller has a row of the schedule."""
        layout = self.equipment.layout
        self.timeline = Timeline(
            self.schedule,
            [clock_of(self.streams.on(layout.devices[w])) for w in layout.workers_here],
            layout.workers_here,
            layout,
            inline=self.inline,
            caller=clock_of(self.streams.on(layout.outside)) if caller else None,
            computed=self.execution.computed,
        )

    def tasks(
        self,
        exchange: Exchange,
        context: Context,
        forward: Context | None = None,
        *,
        told: Collection[int] = (),
    ) -> list[WorkerTask]:
        """Return each worker's task; with ``forward``, the caller's code runs in between."""
        layout = self.equipment.layout
        pass_of = {each.stage.partition.index: each for each in self.passes}
        with_visits = self.equipment.workers_with_visits
        whole = (self.schedule if self.context.grad else exchange.phase).rows
        return [
            (partial(HostWorkerTask, whole[w]) if w in with_visits else WorkerTask)(
                w,
                layout.devices[w],
                {j: pass_of[j] for j in layout.stages_of(w)},
                self.streams,
                exchange,
                context,
                self.timeline,
                forward=forward,
                told=told,
                here=self.inline and forward is None,
            )
            for w in layout.workers_here
        ]

    def settle(self) -> None:
        for stage_pass in self.passes:
            if stage_pass.host is not None:
                stage_pass.host.settle()

    def finish_forward(self, everywhere: Sequence[nn.Parameter] = ()) -> list[Tensor]:
        """Check the effects of layers in forward; return the leaves that will have gradients.

        ``everywhere`` has parameters of stages of other processes that have values here too.
        """
        starts = self.equipment.layout.starts
        for stage_pass in self.passes:
            stage_pass.finish_forward()
            if stage_pass.editors and stage_pass.stage.partition.index in starts:
                warn_of_edited_inputs(stage_pass.editors)
        return self.used_leaves.leaves(everywhere)

    def begin_backward(self, generators: SharedGenerators | None) -> None:
        """Let backward draw, from private generators in the place of the shared ones if any."""
        for each in self.passes:
            each.transfer = self.transfer
            j = each.stage.partition.index
            private = None if generators is None else generators.private(j, backward=True)
            each.randomness.in_backward = private

    def take_gradients(self, *, written: bool = True) -> list[tuple[int, list[Pair]]]:
        """Return each stage's index and pairs of a leaf and a gradient, to be ``written``."""
        return [
            (each.stage.partition.index, each.take_gradients(written=written))
            for each in self.passes
        ]

    def refuse_gradients(self) -> None:
        """Let a gradient raise that arrives in leaves of passes that will have no backward."""
        for stage_pass in self.passes:
            stage_pass.lost_gradients.refuse_gradients()

    def release(self) -> list[LostGradients]:
        """Free everything, also from an error that the user keeps and that may hold this.

        A gradient raises that arrives in a leaf which somebody's graph keeps alive.
        """
        watches = [stage_pass.release() for stage_pass in self.passes]
        self.passes, self.used_leaves = (), _NO_LEAVES
        for watch in watches:
            watch.refuse_gradients()
        return watches

    def undo(self) -> None:
        for stage in self.equipment.stages:
            if stage not in self.outer:
                stage.journal.undo()

    def _randomness(self, generators: SharedGenerators | None, stage: Stage) -> Randomness:
        devices = {torch.device("cpu"), stage.device} - self.shared
        private = None
        if generators is not None:
            private = generators.private(stage.partition.index, grad=self.context.grad)
        library = self.agreement.library
        libraries = library is not None and library.saved
        return Randomness(devices, private, libraries=libraries)


def pass_alone(
    stage: Stage, program: Program, *, recomputed: Collection[int] = (), split: bool = False
) -> StagePass:
    """Return a pass through one stage outside of a mini-batch, for measurements.

    Its shadows must be swapped in while it runs. Its statistics are never committed.
    """
    devices = {torch.device("cpu"), stage.device} - {torch.device("meta")}
    context = Context.capture(devices)
    shadows = stage.shadows(grad=context.grad, recomputed=bool(recomputed))
    return StagePass(
        stage,
        Work(stage, program),
        context,
        frozenset(recomputed),
        Randomness(devices),
        shadows,
        UsedLeaves([shadows]),
        split=split,
    )
