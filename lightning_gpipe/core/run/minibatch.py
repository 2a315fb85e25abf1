"""One mini-batch and its state, which is freed with its output if no backward follows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from lightning_gpipe.core.data import Division, FlatTree, requires_grad
from lightning_gpipe.core.faithful import (
    LIBRARIES,
    NOTHING,
    Context,
    ModuleState,
    RandomState,
    SharedGenerators,
    ThreadState,
)
from lightning_gpipe.core.programs import Program, Route
from lightning_gpipe.core.run.agreement import NO_GENERATORS, SharedErrors
from lightning_gpipe.core.run.backward.sums import Gradients, Pair, sum_gradients
from lightning_gpipe.core.run.caller import Caller, Sent, devices_of
from lightning_gpipe.core.run.minibatch_run import Equipment, MiniBatchRun
from lightning_gpipe.core.run.observe.threads_or_inline import Execution
from lightning_gpipe.core.schedules import Action, Schedule, successor
from lightning_gpipe.core.transport import TOLD, Exchange, Label

_FORWARD, _BACKWARD = 0, 1  # the phases of a schedule whose loss is that of the mini-batch


class MiniBatch(MiniBatchRun):
    """Runs the two phases of a schedule for one mini-batch.

    ``leaves`` are, after forward, those that will have a gradient, each once: parameters, and
    leaves that layers captured from outside. ``refusal`` says why backward must not run yet.
    """

    refusal: str | None = None

    def __init__(
        self,
        equipment: Equipment,
        schedule: Schedule,
        program: Program,
        context: Context,
        *,
        label: Label,
        execution: Execution,
        terms: bool,
    ) -> None:
        super().__init__(equipment, schedule, execution, context, label)
        self._unfinished = equipment.unfinished
        self._program = program
        self._drawn_from: tuple[bytes, ...] = ()  # the states of shared generators before forward
        self._input_devices: list[FlatTree] = []
        self.caller = Caller(program, terms=terms)
        self._terms = terms
        self._told = label.at_last == TOLD
        self._entering = False  # whether an input requires a gradient
        self._examined = False  # whether to look for what is rare, and takes time to find
        self._written = True  # whether autograd writes the gradients of all leaves
        self.leaves: list[Tensor] = []

    def forward(
        self,
        microbatches: Sequence[FlatTree],
        division: Callable[[], Division | None],
        context: Context,
    ) -> list[FlatTree]:
        """Run the first phase, in the caller's thread-local state, which must not be held longer.

        Return each micro-batch's output, joined with the outputs and loss terms of other stages;
        none in a process that does not get the outputs.
        """
        self._input_devices = list(map(devices_of, microbatches))
        with self.session():
            self._unfinished.settle()  # in another thread's backward gradients are on the way
            self.begin()
            generators = self.agreement.generators = self.generators_now()
            self._drawn_from = generators.states
            self.agreement.agree(
                self._program, len(microbatches), self.flags, grad=self.context.grad
            )
            self.begin_work(self._program, microbatches[0], division, terms=self._terms)
            self.choose_transport(self.context.modes or context.modes)
            library = self.begin_library_watch()
            self._examined = library.before is not None  # in few mini-batches
            try:
                outputs = self.equipment.draws.run(
                    self.flags,
                    partial(self._forward, microbatches, context),
                    generators=generators,
                    snapshots=self._snapshots if self.context.grad else None,
                    modes=bool(self.context.modes),
                    recomputed=self.schedule.recomputes,
                )
                self.leaves = self.finish_forward(self.agreement.ties.everywhere)
                if self.context.grad:
                    self._unfinished.add(self, [each.lost_gradients for each in self.passes])
                    self._unfinished.check_captured(self.used_leaves.foreign_leaves)
            except BaseException:
                self.refuse_gradients()
                raise
            self.agreement.generators = NO_GENERATORS  # their states are some kilobytes
            self.agreement.library = None
            library.end()
        return outputs

    def backward(
        self, output_gradients: Sequence[Gradients], *, to_all: bool = True
    ) -> tuple[list[Gradients], Gradients]:
        """Run the second phase, once; return the gradients of inputs, and those of :attr:`leaves`.

        The former are, for each micro-batch, those of the leaves of its input, or none if none
        requires one. ``to_all`` is True if autograd writes the gradients of all leaves of the
        caller's graph.
        """
        if self.refusal is not None:
            raise RuntimeError(self.refusal)
        try:
            home = self.equipment.home if to_all else None
            self.transfer = None if home is None else home.begin()
            self._written = to_all
            # On forward's streams, for which those of backward then wait.
            with self.streams.entered():
                with SharedErrors(self.equipment.transport), self.session():
                    input_gradients, pairs = self._backward(output_gradients, to_all)
                gradients = sum_gradients(pairs, self.leaves)
            self.streams.lend(chain(*input_gradients, gradients))
        finally:
            self.streams.rejoin()
            self.leaves = []
            watches = self.release()
        for watch in watches:
            watch.check_shadows()
        return input_gradients, gradients

    def _forward(
        self,
        microbatches: Sequence[FlatTree],
        context: Context,
        generators: SharedGenerators | None,
    ) -> list[FlatTree]:
        exchange = self.agreement.open(self.transport, _FORWARD)
        self.begin_passes(generators, self.agreement.ties.values(exchange))
        self.begin_timeline()
        self._entering = any(any(map(requires_grad, x.leaves)) for x in microbatches)
        sent = (self.caller.input(i, x) for i, x in enumerate(microbatches))
        send = exchange.send_as_told if self._told else exchange.send
        self._run_workers(exchange, chain.from_iterable(sent), context, send)
        outputs = []
        if self.agreement.gets_outputs:
            outputs = [self.caller.output(exchange, i) for i in range(len(microbatches))]
        else:
            exchange.receive_end()
        self.agreement.end(exchange)
        return outputs

    def _snapshots(self, first: bool) -> Iterator[ModuleState | RandomState]:
        """Yield snapshots for another forward, the first one with these training flags or not."""
        yield from (stage.state.snapshot(first=first) for stage in self.equipment.stages)
        if self.equipment.library_draws.saved(self.flags):
            yield RandomState.of(LIBRARIES)

    def _backward(
        self, output_gradients: Sequence[Gradients], to_all: bool
    ) -> tuple[list[Gradients], Iterable[Pair]]:
        self._unfinished.remove(self)  # this backward checks it
        self._unfinished.settle()
        for stage in self.equipment.stages:
            if stage.in_backward:  # on one thread autograd may run this within another's
                self.outer = *self.outer, stage
            else:
                stage.journal.reset()  # another mini-batch may have failed since forward
        for stage_pass in self.passes:
            stage_pass.lost_gradients.check()
            if self._examined:  # else autograd says so, in other words
                stage_pass.lost_gradients.check_graph()
            if not to_all:
                stage_pass.lost_gradients.warn_of_kept()
            stage_pass.check_unchanged()
        with self.context.default_dtype_set() if self.schedule.recomputes else NOTHING:
            # Recomputation needs grad mode; backward itself runs without it.
            context = Context.capture(self.equipment.layout.devices_here)._replace(grad=True)
            generators = self.agreement.generators = self.generators_now(self._drawn_from)
            self.choose_transport(self.context.modes or context.modes)
            return self.equipment.draws.run_once(
                "backward",
                self.flags,
                partial(self._run_backward, output_gradients, context),
                generators=generators,
                modes=bool(self.context.modes or context.modes),
            )

    def _run_backward(
        self,
        output_gradients: Sequence[Gradients],
        context: Context,
        generators: SharedGenerators | None,
    ) -> tuple[list[Gradients], Iterable[Pair]]:
        self.begin_backward(generators)
        if self.transfer is not None:
            self.transfer.open()
        exchange = self.agreement.open(self.transport, _BACKWARD, self._awaited())
        caller, devices = self.caller, self._input_devices
        if not self.agreement.gets_outputs:
            output_gradients = ()
        sent = (caller.output_gradient(i, leaves) for i, leaves in enumerate(output_gradients))
        self._run_workers(exchange, chain.from_iterable(sent), context, exchange.send)
        end = exchange.phase.last_result
        if self._entering and self.agreement.gets_gradients:
            input_gradients = [caller.input_gradient(exchange, x, i) for i, x in enumerate(devices)]
        else:
            exchange.receive_end()
            input_gradients = [[] for _ in devices]
        by_stage = self.take_gradients(written=self._written)
        gradients = self.agreement.ties.gradients(exchange, end, by_stage)
        self.agreement.end(exchange)
        if self.transfer is not None:
            gradients += self.transfer.receive()
        return input_gradients, gradients

    def _awaited(self) -> list[Action]:
        """Return the results to wait for in a backward; the last one ends when all has ended."""
        own = self.schedule.last_backwards
        return list(map(successor, own if self._entering else own[-1:]))

    def _run_workers(
        self,
        exchange: Exchange,
        sent: Iterable[Sent],
        context: Context,
        send: Callable[[Action, FlatTree, Route | None], None],
    ) -> None:
        for action, value, route in sent:
            send(action, value, route)
        tasks = self.tasks(exchange, context)
        state = ThreadState.capture()
        try:
            if self.inline and state.grad != context.grad:
                torch._C._set_grad_enabled(context.grad)
            self.transport.run(exchange, tasks)
        finally:
            if self.inline:  # Ctrl-C interrupts this thread, also just before a `with` block exits
                self.undo()
                state.restore()
            if self.equipment.workers_with_visits:
                self.settle()
        if self.inline:
            context.clear_autocast_cache()
