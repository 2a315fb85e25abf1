"""One mini-batch and its state in the pipeline.

A pipeline outlives its mini-batches; what belongs to one mini-batch is here: its schedule, its pass
through each stage, its workers and its timeline. Only the autograd node of the mini-batch's output
refers to it, so a forward that is never followed by a backward frees everything when its output is
freed.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from lightning_gpipe.core.data import Division, FlatTree
from lightning_gpipe.core.faithful import (
    NOTHING,
    Context,
    LibrarySnapshot,
    OwnGenerators,
    Randomness,
    RowWatch,
    SharedGenerators,
    Snapshot,
    Streams,
    ThreadState,
    TrainingFlags,
    on_engine_thread,
)
from lightning_gpipe.core.plan import Layout, Program, Schedule
from lightning_gpipe.core.run.asides import Unfinished
from lightning_gpipe.core.run.caller import Caller, Sent
from lightning_gpipe.core.run.draws import Draws
from lightning_gpipe.core.run.gradients import Gradients, sum_gradients
from lightning_gpipe.core.run.library_draws import LibraryDraws, LibraryWatch
from lightning_gpipe.core.run.passes import NO_PASSES, begin_passes
from lightning_gpipe.core.run.stage import Stage
from lightning_gpipe.core.run.telling import Telling
from lightning_gpipe.core.run.ties import Ties
from lightning_gpipe.core.run.timeline import Timeline
from lightning_gpipe.core.run.ways import Way
from lightning_gpipe.core.run.work import work_of
from lightning_gpipe.core.run.worker import Worker
from lightning_gpipe.core.transport import Exchange, Label, Transport, Twins

_FORWARD, _BACKWARD = 0, 1  # the phases of a schedule whose loss is that of the mini-batch
_NO_GENERATORS = SharedGenerators(())


class MiniBatch:
    """Runs the two phases of a schedule for one mini-batch.

    Args:
        stages: The stages of this process, in order.
        layout: What runs where.
        schedule: What to run.
        program: What the stages run, if that is not their layers.
        transport: What connects the workers.
        draws: Records whether the layers draw random numbers.
        terms: Whether to collect loss terms.
        library_draws: Records whether they do so from Python's or NumPy's generator.
        unfinished: Mini-batches whose backward has not run; this one is added.
        training_flags: Which modules of the stages of all processes are in training mode.
        label: Which mini-batch it is.
        twins: Knows tensors of the batch that are on the first stage's device already.
        way: Whether it runs on the caller's thread, though the transport has threads.

    Attributes:
        timeline: What ran when, once forward has begun.
        caller: What the caller sends and gets.
        leaves: After forward, those that will have a gradient, each once: parameters, and those
            that layers captured from outside.
    """

    timeline: Timeline

    def __init__(
        self,
        stages: Sequence[Stage],
        layout: Layout,
        schedule: Schedule,
        program: Program | None = None,
        *,
        transport: Transport,
        draws: Draws,
        library_draws: LibraryDraws,
        unfinished: Unfinished,
        training_flags: Callable[[], TrainingFlags],
        label: Label,
        way: Way,
        terms: bool = False,
        twins: Twins | None = None,
    ) -> None:
        self._passes = NO_PASSES
        self._stages = stages
        self._layout = layout
        self._schedule = schedule
        self._program = program
        self._works = [work_of(stage, program) for stage in stages]
        self._transport = self._transport_now = transport  # now: the one that runs the phase
        self._draws = draws
        self._library_draws = library_draws
        self._unfinished = unfinished
        self._library: LibraryWatch | None = None  # in forward
        self._training_flags = training_flags
        self._label = label
        self._way = way
        self._ties = Ties(layout)
        self._context = Context.capture(layout.devices_here)
        self._streams = Streams.capture(layout.devices_here)
        self._flags: TrainingFlags = b""
        self._generators = _NO_GENERATORS
        self._drawn_from: tuple[bytes, ...] = ()  # the states of shared generators before forward
        self._workers: list[Worker] = []
        self._input_devices: list[FlatTree] = []
        self.caller = Caller(layout.n, program, terms=terms, twins=twins)
        self._terms = terms
        self.leaves: list[Tensor] = []

    def forward(
        self, microbatches: Sequence[FlatTree], division: Callable[[], Division | None]
    ) -> list[FlatTree]:
        """Run the first phase, and return each micro-batch's output on the last device.

        If other stages have outputs or loss terms too, it is joined with those.

        Args:
            microbatches: The micro-batches.
            division: Tells how many rows each has, if that is known.
        """
        context = self._context
        self._context = context.for_backward(recomputes=self._schedule.recomputes)
        self._input_devices = [
            FlatTree([_device_of(leaf) for leaf in leaves], spec) for leaves, spec in microbatches
        ]
        with self._transport.exclusive(), Telling(self._transport), self._way.timed:
            self._unfinished.settle()  # in another thread's backward gradients are on the way
            for stage in self._stages:
                stage.refresh()
            self._flags = self._training_flags()
            generators = self._generators = self._generators_now()
            self._drawn_from = generators.states
            if self._layout.spread:
                self._label = self._label_now(len(microbatches), generators.number)
            signature = self._flags, microbatches[0].spec
            watches = [
                stage.watch((*signature, work.signature), division)
                if len(microbatches) > 1
                else None
                for stage, work in zip(self._stages, self._works, strict=True)
            ]
            self._transport_now = self._transport_in(context)
            alone = self._inline and not self._layout.spread
            library = self._library = self._library_draws.begin(
                self._flags, alone=alone, recomputed=self._recomputes, spread=self._layout.spread
            )
            try:
                outputs = self._draws.run(
                    self._flags,
                    partial(self._forward, context, microbatches, watches),
                    generators=generators,
                    snapshots=self._snapshots if self._context.grad else None,
                    modes=bool(self._context.modes),
                    recomputed=self._recomputes,
                )
                self._finish_forward()
            except BaseException:
                self._passes.refuse_gradients()
                raise
            self._generators = _NO_GENERATORS  # their states are some kilobytes
            self._library = None
            library.end()
        return outputs

    def backward(self, output_gradients: Sequence[Gradients]) -> tuple[list[Gradients], Gradients]:
        """Run the second phase, once.

        Args:
            output_gradients: For each micro-batch, the gradients of the leaves of its output.

        Returns:
            For each micro-batch the gradients of the leaves of its input, on the devices of those
            leaves (the list may be empty if no input requires a gradient), and the gradients of
            :attr:`leaves`, summed over all micro-batches and stages.
        """
        try:
            # On forward's streams, for which those of backward then wait.
            with self._streams.entered():
                with self._transport.exclusive(), Telling(self._transport), self._way.timed:
                    input_gradients, taken = self._backward(output_gradients)
                gradients = sum_gradients(taken, self.leaves)
            self._streams.lend(chain(*input_gradients, gradients))
        finally:
            self._streams.rejoin()
            # Everything: an error that the user keeps may hold this.
            self._workers, self.leaves = [], []  # first, or they would keep the shadows alive
            asides = self._passes.release()
        for each in asides:
            each.check_shadows()
        return input_gradients, gradients

    def _finish_forward(self) -> None:
        """Check what layers did in forward, and record whose gradients backward will compute."""
        self.leaves = self._passes.finish_forward(self._ties.everywhere)
        if self._context.grad:
            self._unfinished.add(self, self._passes.asides)
            self._unfinished.check_captured(self._passes.foreign_leaves)

    def _forward(
        self,
        context: Context,
        microbatches: Sequence[FlatTree],
        watches: Sequence[RowWatch | None],
        shared: SharedGenerators | None,
    ) -> list[FlatTree]:
        """Run the first phase, with private generators in the place of ``shared`` ones if any."""
        exchange = self._open(_FORWARD)
        self._begin(watches, shared, self._ties.values(exchange))
        self._run(exchange, self.caller.inputs(microbatches), context)
        outputs = self.caller.outputs(exchange, len(microbatches))
        self._end(exchange)
        return outputs

    def _begin(
        self,
        watches: Sequence[RowWatch | None],
        shared: SharedGenerators | None,
        values: Mapping[int, Tensor],
    ) -> None:
        """Make new passes, workers and a new timeline."""
        self._passes.refuse_gradients()  # of those before, if forward runs again: layers draw
        layout = self._layout
        self._passes = begin_passes(
            self._stages,
            self._works,
            self._schedule,
            self._context,
            watches,
            partial(self._randomness, shared),
            values,
            spread=layout.spread,
            terms=self._terms,
        )
        self._workers = [
            Worker(w, layout.devices[w], self._passes.of(layout.stages_of(w)), self._streams)
            for w in layout.workers_here
        ]
        clocks = [worker.clock for worker in self._workers]
        self.timeline = Timeline(
            self._schedule,
            clocks,
            layout.workers_here,
            layout,
            inline=self._inline,
            computed=self._way.computed,
        )

    def _generators_now(self, but_for: tuple[bytes, ...] | None = None) -> SharedGenerators:
        """The generators that several workers share, as they are now."""
        shared = self._draws.shared
        return SharedGenerators(shared, but_for=but_for) if shared else _NO_GENERATORS

    def _randomness(self, shared: SharedGenerators | None, stage: Stage) -> Randomness:
        devices = {torch.device("cpu"), stage.device} - self._draws.shared
        own = OwnGenerators(devices, None if self._library is None else self._library.saved)
        private = None
        if shared is not None:
            private = shared.private(stage.partition.index, grad=self._context.grad)
        return Randomness(own, private)

    def _snapshots(self, first: bool) -> Iterator[Snapshot | LibrarySnapshot]:
        """Snapshots to run forward again, for the first time with these training flags or not."""
        yield from (stage.snapshot(first=first) for stage in self._stages)
        if self._library_draws.saved(self._flags):
            yield LibrarySnapshot()

    def _backward(
        self, output_gradients: Sequence[Gradients]
    ) -> tuple[list[Gradients], Iterable[tuple[Tensor, Tensor]]]:
        """Run the second phase; returns the gradients of the inputs, and those of the leaves."""
        self._unfinished.remove(self)  # this backward checks it
        self._unfinished.settle()
        sent = self.caller.output_gradients(output_gradients)
        for stage in self._stages:
            stage.journal.reset()  # another mini-batch may have failed since forward
        self._passes.check()
        with self._context.default_dtype_set() if self._recomputes else NOTHING:
            # Recomputation needs grad mode; backward itself runs without it.
            context = Context.capture(self._layout.devices_here)._replace(grad=True)
            generators = self._generators = self._generators_now(self._drawn_from)
            self._transport_now = self._transport_in(context)
            return self._draws.run_backward(
                self._flags,
                partial(self._run_backward, sent, context),
                generators=generators,
                modes=bool(self._context.modes or context.modes),
            )

    def _run_backward(
        self, sent: Iterable[Sent], context: Context, shared: SharedGenerators | None
    ) -> tuple[list[Gradients], Iterable[tuple[Tensor, Tensor]]]:
        """Run the second phase, with private generators in the place of ``shared`` ones if any."""
        for each in self._passes:
            j = each.stage.partition.index
            private = None if shared is None else shared.private_in_backward(j)
            each.randomness.begin_backward(private)
        exchange = self._open(_BACKWARD)
        self._run(exchange, sent, context)
        input_gradients = self.caller.input_gradients(exchange, self._input_devices)
        taken = self._passes.take_gradients()
        if self._ties:
            end = self.caller.awaited(exchange.phase)[-1]
            gradients = self._ties.gradients(exchange, end, taken)
        else:
            gradients = [pair for _, pairs in taken for pair in pairs]
        self._end(exchange)
        return input_gradients, gradients

    def _open(self, phase: int) -> Exchange:
        """A new exchange for a phase."""
        schedule = self._schedule.phase(phase)
        awaited = self.caller.awaited(schedule) if phase == _BACKWARD else None
        label = self._label._replace(phase=phase) if self._layout.spread else None
        exchange = self._transport_now.open(schedule, label, awaited)
        exchange.signal(self._bits)
        return exchange

    def _end(self, exchange: Exchange) -> None:
        """End a phase, once the caller has all results."""
        exchange.settle()
        self._generators.hear(exchange.heard)
        if self._library is not None:
            self._library.heard |= exchange.heard

    def _bits(self) -> int:
        """What other processes must hear."""
        return self._generators.bits | (0 if self._library is None else self._library.bits)

    def _run(self, exchange: Exchange, sent: Iterable[Sent], context: Context) -> None:
        """Run the workers in ``context``, given what the caller sends them."""
        schedule = exchange.phase
        for action, value, route in sent:
            exchange.send(action, value, route)
        inline = self._inline
        tasks = [
            worker.task(schedule, exchange, context, self.timeline, here=inline)
            for worker in self._workers
        ]
        state = ThreadState.capture()
        try:
            if inline and state.grad != context.grad:
                torch._C._set_grad_enabled(context.grad)
            self._transport_now.run(exchange, tasks)
        finally:
            if inline:  # Ctrl-C interrupts this thread, also just before a `with` block exits
                for stage in self._stages:
                    stage.journal.undo()
                state.restore()
        if inline:
            context.clear_autocast_cache()

    def _transport_in(self, context: Context) -> Transport:
        """The transport; inline if that is the way, or threads lack the caller's state."""
        # Recomputation enters the modes of forward.
        modes = self._context.modes or context.modes
        inline = self._way.inline or modes or on_engine_thread()
        return self._transport.inline() if inline else self._transport

    @property
    def _inline(self) -> bool:
        """Whether the caller's thread runs the phase."""
        return self._transport_now is self._transport.inline()

    @property
    def _recomputes(self) -> bool:
        """Whether any micro-batch is recomputed."""
        return self._schedule.recomputes

    def _label_now(self, m: int, state: int) -> Label:
        """What all processes agree on; differs, almost surely, where one runs something else."""
        training = sum(self._flags) << 32 | zlib.crc32(self._flags)
        return self._label._replace(
            grad=int(self._context.grad),
            microbatches=m,
            training=training,
            program=0 if self._program is None else self._program.fingerprint,
            state=state,
        )


def _device_of(leaf: Any) -> torch.device | None:
    return leaf.device if isinstance(leaf, Tensor) else None
