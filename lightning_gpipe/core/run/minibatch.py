"""One mini-batch and its state in the pipeline.

A pipeline outlives its mini-batches; the schedule, passes, workers and timeline of one mini-batch
are here. Only the autograd node of the mini-batch's output
refers to it, so a forward that is never followed by a backward frees everything when its output is
freed.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from lightning_gpipe.core.data import Division, FlatTree
from lightning_gpipe.core.faithful import (
    LIBRARIES,
    NOTHING,
    Context,
    ModuleState,
    RandomState,
    SharedGenerators,
    ThreadState,
)
from lightning_gpipe.core.programs import Program
from lightning_gpipe.core.run.backward.sums import Gradients, sum_gradients
from lightning_gpipe.core.run.caller import Caller, Sent, devices_of
from lightning_gpipe.core.run.minibatch_run import Equipment, MiniBatchRun
from lightning_gpipe.core.run.observe.threads_or_inline import Execution
from lightning_gpipe.core.run.observe.timeline import Timeline
from lightning_gpipe.core.run.other_processes import Telling
from lightning_gpipe.core.run.shared_parameters import Ties
from lightning_gpipe.core.run.worker import WorkerTask
from lightning_gpipe.core.schedules import Schedule
from lightning_gpipe.core.transport import Exchange, Label

_FORWARD, _BACKWARD = 0, 1  # the phases of a schedule whose loss is that of the mini-batch
_NO_GENERATORS = SharedGenerators(())


class MiniBatch:
    """Runs the two phases of a schedule for one mini-batch.

    Attributes:
        timeline: The record of its actions, once forward has begun.
        caller: The caller's end of the pipeline.
        leaves: After forward, the leaves that will have a gradient, each once: parameters, and
            leaves that layers captured from outside.
    """

    timeline: Timeline

    def __init__(
        self,
        equipment: Equipment,
        schedule: Schedule,
        program: Program,
        context: Context,
        *,
        label: Label,
        execution: Execution,
        terms: bool = False,
    ) -> None:
        self._layout = equipment.layout
        self._draws = equipment.draws
        self._unfinished = equipment.unfinished
        self._transport_now = equipment.transport  # of the phase
        self._inline = False  # whether the caller's thread runs the phase
        self._run = MiniBatchRun(equipment, schedule, execution, context)
        self._program = program
        self._label = label
        self._ties = Ties(self._layout)
        self._generators = _NO_GENERATORS
        self._drawn_from: tuple[bytes, ...] = ()  # the states of shared generators before forward
        self._input_devices: list[FlatTree] = []
        self.caller = Caller(program, terms=terms)
        self._terms = terms
        self.leaves: list[Tensor] = []

    def forward(
        self,
        microbatches: Sequence[FlatTree],
        division: Callable[[], Division | None],
        context: Context,
    ) -> list[FlatTree]:
        """Run the first phase, in the caller's thread-local state, which must not be held longer.

        Returns:
            Each micro-batch's output on the last device, joined with the outputs and loss terms of
            other stages if there are any.
        """
        run = self._run
        self._input_devices = list(map(devices_of, microbatches))
        with run.session:
            self._unfinished.settle()  # in another thread's backward gradients are on the way
            run.begin()
            generators = self._generators = self._generators_now()
            self._drawn_from = generators.states
            if self._layout.spread:
                self._label = self._label_now(len(microbatches), generators.number)
            run.begin_work(self._program, microbatches[0], division)
            self._choose_transport(context)
            library = run.begin_library_watch(inline=self._inline)
            try:
                outputs = self._draws.run(
                    run.flags,
                    partial(self._forward, microbatches, context),
                    generators=generators,
                    snapshots=self._snapshots if run.context.grad else None,
                    modes=bool(run.context.modes),
                    recomputed=run.schedule.recomputes,
                )
                self._finish_forward()
            except BaseException:
                run.refuse_gradients()
                raise
            self._generators = _NO_GENERATORS  # their states are some kilobytes
            run.library = None
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
        run = self._run
        try:
            # On forward's streams, for which those of backward then wait.
            with run.streams.entered():
                with Telling(run.equipment.transport), run.session:
                    input_gradients, pairs = self._backward(output_gradients)
                gradients = sum_gradients(pairs, self.leaves)
            run.streams.lend(chain(*input_gradients, gradients))
        finally:
            run.streams.rejoin()
            self.leaves = []
            watches = run.release()
        for watch in watches:
            watch.check_shadows()
        return input_gradients, gradients

    def _finish_forward(self) -> None:
        """Check what layers did in forward, and record whose gradients backward will compute."""
        run = self._run
        self.leaves = run.finish_forward(self._ties.everywhere)
        if run.context.grad:
            self._unfinished.add(self, run.lost_gradients)
            self._unfinished.check_captured(run.foreign_leaves)

    def _forward(
        self,
        microbatches: Sequence[FlatTree],
        context: Context,
        generators: SharedGenerators | None,
    ) -> list[FlatTree]:
        exchange = self._open(_FORWARD)
        self._run.begin_passes(generators, values=self._ties.values(exchange), terms=self._terms)
        self.timeline = Timeline(
            self._run.schedule,
            [worker.clock for worker in self._run.workers],
            self._layout.workers_here,
            self._layout,
            inline=self._inline,
            computed=self._run.execution.computed,
        )
        self._run_workers(exchange, self.caller.inputs(microbatches), context)
        outputs = self.caller.outputs(exchange, len(microbatches))
        self._end(exchange)
        return outputs

    def _generators_now(self, but_for: tuple[bytes, ...] | None = None) -> SharedGenerators:
        """Return the generators that several workers share, as they are now."""
        shared = self._run.shared
        return SharedGenerators(shared, but_for=but_for) if shared else _NO_GENERATORS

    def _snapshots(self, first: bool) -> Iterator[ModuleState | RandomState]:
        """Yield snapshots for another forward, the first one with these training flags or not."""
        yield from (stage.snapshot(first=first) for stage in self._run.equipment.stages)
        if self._run.equipment.library_draws.saved(self._run.flags):
            yield RandomState.of(LIBRARIES)

    def _backward(
        self, output_gradients: Sequence[Gradients]
    ) -> tuple[list[Gradients], Iterable[tuple[Tensor, Tensor]]]:
        self._unfinished.remove(self)  # this backward checks it
        self._unfinished.settle()
        sent = self.caller.output_gradients(output_gradients)
        run = self._run
        for stage in run.equipment.stages:
            stage.journal.reset()  # another mini-batch may have failed since forward
        run.check()
        with run.context.default_dtype_set() if run.schedule.recomputes else NOTHING:
            # Recomputation needs grad mode; backward itself runs without it.
            context = Context.capture(self._layout.devices_here)._replace(grad=True)
            generators = self._generators = self._generators_now(self._drawn_from)
            self._choose_transport(context)
            return self._draws.run_backward(
                run.flags,
                partial(self._run_backward, sent, context),
                generators=generators,
                modes=bool(run.context.modes or context.modes),
            )

    def _run_backward(
        self, sent: Iterable[Sent], context: Context, generators: SharedGenerators | None
    ) -> tuple[list[Gradients], Iterable[tuple[Tensor, Tensor]]]:
        self._run.begin_backward(generators)
        exchange = self._open(_BACKWARD)
        self._run_workers(exchange, sent, context)
        input_gradients = self.caller.input_gradients(exchange, self._input_devices)
        by_stage = self._run.take_gradients()
        if self._ties:
            end = self.caller.awaited(exchange.phase)[-1]
            gradients = self._ties.gradients(exchange, end, by_stage)
        else:
            gradients = [pair for _, pairs in by_stage for pair in pairs]
        self._end(exchange)
        return input_gradients, gradients

    def _open(self, phase: int) -> Exchange:
        """Open an exchange for a phase."""
        schedule = self._run.schedule.phase(phase)
        awaited = self.caller.awaited(schedule) if phase == _BACKWARD else None
        label = self._label._replace(phase=phase) if self._layout.spread else None
        exchange = self._transport_now.open(schedule, label, awaited)
        exchange.signal(self._bits)
        return exchange

    def _end(self, exchange: Exchange) -> None:
        """End a phase, once the caller has all results."""
        exchange.settle()
        self._generators.hear(exchange.heard)
        if self._run.library is not None:
            self._run.library.heard |= exchange.heard

    def _bits(self) -> int:
        """The signals for other processes."""
        library = self._run.library
        return self._generators.bits | (0 if library is None else library.bits)

    def _run_workers(self, exchange: Exchange, sent: Iterable[Sent], context: Context) -> None:
        """Send the caller's messages to the workers, and run these in ``context``."""
        schedule = exchange.phase
        for action, value, route in sent:
            exchange.send(action, value, route)
        inline = self._inline
        tasks = [
            WorkerTask(worker, schedule, exchange, context, self.timeline, here=inline)
            for worker in self._run.workers
        ]
        state = ThreadState.capture()
        try:
            if inline and state.grad != context.grad:
                torch._C._set_grad_enabled(context.grad)
            self._transport_now.run(exchange, tasks)
        finally:
            if inline:  # Ctrl-C interrupts this thread, also just before a `with` block exits
                self._run.undo()
                state.restore()
        if inline:
            context.clear_autocast_cache()

    def _choose_transport(self, context: Context) -> None:
        """Choose the transport of a phase in ``context``; recomputation enters forward's modes."""
        run = self._run
        self._transport_now = run.transport_in(run.context.modes or context.modes)
        self._inline = self._transport_now is run.equipment.transport.inline()

    def _label_now(self, m: int, state: int) -> Label:
        """Return the label, which differs almost surely where a process runs something else."""
        training = sum(self._run.flags) << 32 | zlib.crc32(self._run.flags)
        return self._label._replace(
            grad=int(self._run.context.grad),
            microbatches=m,
            training=training,
            program=self._program.fingerprint,
            state=state,
        )
