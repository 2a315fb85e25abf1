"""Runs one worker's row of the schedule over its stages.

This is the loop with the effects, without decisions of its own: the row gives the next action, and
the action gives its inputs and the place of its result. Forward receives from the previous stage
and sends to the next; backward mirrors it.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Mapping, Sequence
from time import thread_time

import torch
from typing_extensions import override

from lightning_gpipe.core.data import FlatTree, join, parted
from lightning_gpipe.core.faithful import Context, Manager, Streams, add_note, together
from lightning_gpipe.core.programs import Route
from lightning_gpipe.core.run.caller import term_route
from lightning_gpipe.core.run.observe.clocks import clock_of
from lightning_gpipe.core.run.observe.profiler_names import named, profiled
from lightning_gpipe.core.run.observe.timeline import Timeline
from lightning_gpipe.core.run.stage_pass import StagePass
from lightning_gpipe.core.schedules import Action, Kind, Schedule, successor
from lightning_gpipe.core.skip import using_table
from lightning_gpipe.core.transport import Cancelled, Exchange, Task


class Worker:
    """One device's worker for one mini-batch.

    Args:
        index: Its index.
        device: Its device.
        passes: The mini-batch's pass through each of its stages, by the index of the stage.
        streams: The caller's streams, on which its layers compute.
        forward: The thread-local state of forwards, if backwards have another one.

    Attributes:
        stream: The stream of its device; None for the CPU.
        clock: The clock of the stream.
    """

    def __init__(
        self,
        index: int,
        device: torch.device,
        passes: Mapping[int, StagePass],
        streams: Streams,
        forward: Context | None = None,
    ) -> None:
        self.forward = forward
        self.index = index
        self.passes = passes
        self.streams = streams
        self.stream = streams.on(device)
        self.clock = clock_of(self.stream)


class WorkerTask(Task):
    """A worker's row of one phase.

    Args:
        worker: The worker.
        phase: The phase.
        exchange: Sends its results, and receives its inputs.
        context: The caller's thread-local state, to run in.
        timeline: Records its actions.
        here: Whether the thread that performs it has this state and these streams already.
    """

    def __init__(
        self,
        worker: Worker,
        phase: Schedule,
        exchange: Exchange,
        context: Context,
        timeline: Timeline,
        *,
        here: bool = False,
    ) -> None:
        self._worker = worker
        self._here = here
        self._passes = worker.passes
        self._forward = None if worker.forward is context else worker.forward
        self._now = worker.clock.now
        self._row = phase.rows[worker.index]
        self._m, self._n = phase.m, phase.n
        self._forwards = phase.forwards
        self._exchange = exchange
        self._context = context
        self._record = timeline.records.append
        self._inline = timeline.inline
        self._computed = timeline.computed.append
        self._profiled = profiled()

    @property
    @override
    def row(self) -> Sequence[Action]:
        return self._row

    @property
    @override
    def variables(self) -> contextvars.Context:
        return self._context.variables

    @override
    def session(self, *, joined: bool = False) -> Manager:
        # The thread that runs the layers swaps in their shadows, because Ctrl-C only interrupts the
        # caller's. Backward reaches the shadows through the graphs.
        managers: list[Manager] = []
        if not joined:
            if not self._here:
                managers = [self._worker.streams.entered(), self._context.entered()]
            managers.append(using_table({}))
        if self._forwards:
            managers += [
                stage_pass.shadows.swapped_in(stage_pass.stage.journal)
                for stage_pass in self._passes.values()
                if not stage_pass.shadows.in_place
            ]
        return together(managers)

    @override
    def perform(self, actions: Sequence[Action]) -> None:
        begun = 0.0 if self._inline else thread_time()
        if self._worker.stream is not None:
            # With another current device, more of the thread's state may differ from the context.
            with torch.cuda.device(self._worker.stream.device), self._context.entered():
                self._perform(actions)
        else:
            self._perform(actions)
        if not self._inline:
            self._computed(thread_time() - begun)

    @override
    def abandon(self) -> None:
        for stage_pass in self._passes.values():
            stage_pass.stage.journal.abandon()

    def _perform(self, actions: Sequence[Action]) -> None:
        exchange = self._exchange
        for action in actions:
            if exchange.cancelled:
                exchange.check()
            try:
                _VERBS[action.kind](self, action)
            except BaseException as error:
                if not isinstance(error, Cancelled):
                    add_note(error, f"raised in {self._describe(action)}")
                raise

    def _pass_on(self, action: Action) -> None:
        """Receive the inputs of the action, run it, and send its result."""
        exchange = self._exchange
        stage_pass = self._passes[action.j]
        run: Callable[[int, FlatTree], FlatTree] = stage_pass.forward
        arriving, leaving = stage_pass.work.arriving, stage_pass.work.leaving
        if action.kind is Kind.BACKWARD:
            run, arriving, leaving = stage_pass.backward, leaving, arriving
            if stage_pass.terms:
                arriving = (*arriving, term_route(action.j, self._n))

        value = exchange.receive(action)
        if arriving:
            value = join([value, *(exchange.receive(action, route) for route in arriving)])
        if self._profiled:
            run = named(action, run)
        if self._forward is not None and action.kind is Kind.FORWARD:
            run = _within(self._forward, run)
        start = self._now()
        result = run(action.i, value)
        self._record((self._worker.index, action, start, self._now()))
        if stage_pass.terms and action.kind is Kind.FORWARD:
            terms = stage_pass.take_terms(action.i)
            exchange.send(action._replace(j=self._n), terms, term_route(action.j, self._n))
        if leaving:
            result = self._send_by_routes(action, result, leaving)
        exchange.send(successor(action), result)

    def _recompute(self, action: Action) -> None:
        self._run(action, self._passes[action.j].recompute)

    def _weights(self, action: Action) -> None:
        self._run(action, self._passes[action.j].weights)

    def _run(self, action: Action, run: Callable[[int], None]) -> None:
        """Run an action without inputs from other stages or results for them."""
        if self._profiled:
            run = named(action, run)
        start = self._now()
        run(action.i)
        self._record((self._worker.index, action, start, self._now()))

    def _send_by_routes(self, by: Action, value: FlatTree, routes: Sequence[Route]) -> FlatTree:
        """Send the values of an action's result that leave by routes, and return the rest."""
        none = [FlatTree([])] * (1 + len(routes))  # where nothing requires a gradient
        main, *others = parted(value, len(none)) if value.spec is not None else none
        for route, tree in zip(routes, others, strict=True):
            j = route.target if by.kind.direction > 0 else route.source
            self._exchange.send(by._replace(j=j), tree, route)
        return main

    def _describe(self, action: Action) -> str:
        microbatch = f"micro-batch {action.i} of {self._m}"
        return f"{action.kind.verb} of {microbatch} on {self._passes[action.j].stage}"


def _within(
    context: Context, run: Callable[[int, FlatTree], FlatTree]
) -> Callable[[int, FlatTree], FlatTree]:
    """Wrap ``run`` in a thread-local state of its own."""

    def run_within(i: int, value: FlatTree) -> FlatTree:
        with context.entered():
            return run(i, value)

    return run_within


_VERBS: dict[Kind, Callable[[WorkerTask, Action], None]] = {
    Kind.FORWARD: WorkerTask._pass_on,
    Kind.RECOMPUTE: WorkerTask._recompute,
    Kind.BACKWARD: WorkerTask._pass_on,
    Kind.WEIGHTS: WorkerTask._weights,
}
