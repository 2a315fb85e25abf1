"""Runs one worker's row of the schedule over its stages, without decisions of its own."""

from __future__ import annotations

import contextvars
import threading
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from time import thread_time
from typing import Any, ClassVar

import torch
from torch.profiler import record_function
from typing_extensions import override

from lightning_gpipe.core.data import FlatTree, join, parted
from lightning_gpipe.core.faithful import Context, Manager, Streams, add_note, together
from lightning_gpipe.core.programs import Route
from lightning_gpipe.core.run.guards.forbidden_edits import check_late_edit
from lightning_gpipe.core.run.host.traffic import HostTraffic
from lightning_gpipe.core.run.observe.timeline import Timeline
from lightning_gpipe.core.run.stage_pass import StagePass
from lightning_gpipe.core.schedules import Action, Kind, Row, successor
from lightning_gpipe.core.skip import using_table
from lightning_gpipe.core.transport import Exchange, RunCancelled, Task


class RowTask(Task):
    """A row of one phase, whose errors say where they happened."""

    _verbs: ClassVar[Mapping[Kind, Callable[[Any, Action], None]]]

    def __init__(self, row: Sequence[Action], exchange: Exchange, context: Context) -> None:
        self.row = row
        self.variables = context.variables
        self._exchange = exchange
        self._context = context

    @override
    def perform(self, actions: Sequence[Action], *, at_once: bool = False) -> None:
        exchange = self._exchange
        for action in actions:
            if exchange.cancelled:
                exchange.check()
            try:
                self._verbs[action.kind](self, action)
            except BaseException as error:
                if not isinstance(error, RunCancelled):
                    add_note(error, f"raised in {self._describe(action, error)}")
                raise

    @abstractmethod
    def _describe(self, action: Action, error: BaseException) -> str: ...


class WorkerTask(RowTask):
    """A worker's row of one phase.

    Args:
        passes: The mini-batch's pass through each of its stages, by the index of the stage.
        streams: The caller's streams, on which its layers compute.
        context: The caller's thread-local state, to run in.
        forward: The thread-local state of forwards, if the caller's code runs in between.
        told: The stages that the caller tells when it has prepared a micro-batch.
        here: Whether the thread that performs it has this state and these streams already.
    """

    def __init__(
        self,
        w: int,
        device: torch.device,
        passes: Mapping[int, StagePass],
        streams: Streams,
        exchange: Exchange,
        context: Context,
        timeline: Timeline,
        *,
        forward: Context | None = None,
        told: Collection[int] = (),
        here: bool = False,
    ) -> None:
        phase = exchange.phase
        super().__init__(phase.rows[w], exchange, context)
        self.using = threading.RLock()
        self._w = w
        self._passes = passes
        self._streams = streams
        self._stream = streams.on(device)
        self._here = here
        self._beside_code = forward is not None
        self._forward = None if forward is context else forward
        self._told = told
        self._now = timeline.clocks[w].now
        self._m = phase.m
        self._forwards = phase.forwards
        self._record = timeline.records.append
        self._inline = timeline.inline
        self._computed = timeline.computed.append
        self._profiled = torch.autograd.profiler._is_profiler_enabled  # in any thread

    @override
    def session(self, *, joined: bool = False) -> Manager:
        # The thread that runs the layers swaps in their shadows, because Ctrl-C only interrupts the
        # caller's. Backward reaches the shadows through the graphs.
        managers: list[Manager] = []
        if not joined:
            if not self._here:
                managers = [self._streams.entered(), self._context.entered()]
            managers.append(using_table({}))
        if self._forwards:
            managers += [
                stage_pass.shadows.swapped_in(stage_pass.stage.journal)
                for stage_pass in self._passes.values()
                if not stage_pass.shadows.in_place
            ]
        session = together(managers)
        return _Holding(self.using, session) if self._beside_code else session

    @override
    def perform(self, actions: Sequence[Action], *, at_once: bool = False) -> None:
        begun = 0.0 if self._inline else thread_time()
        if at_once and self._m > 1 and not self._profiled and self._passes[actions[0].j].at_once:
            self._perform_at_once(actions)
        elif self._stream is not None:
            # With another current device, more of the thread's state may differ from the context.
            with torch.cuda.device(self._stream.device), self._context.entered():
                super().perform(actions)
        else:
            super().perform(actions)
        if not self._inline:
            self._computed(thread_time() - begun)

    @override
    def abandon(self) -> None:
        for stage_pass in self._passes.values():
            stage_pass.stage.journal.abandon()

    def _pass_on(self, action: Action) -> None:
        exchange = self._exchange
        stage_pass = self._passes[action.j]
        run: Callable[[int, FlatTree], FlatTree] = stage_pass.forward

        value = exchange.receive(action)
        if action.kind is Kind.FORWARD and action.j in self._told:
            exchange.receive(action._replace(kind=Kind.PREPARE))
        work = stage_pass.works[action.i]
        arriving, leaving = work.arriving, work.leaving
        if action.kind is Kind.BACKWARD:
            run, arriving, leaving = stage_pass.backward, leaving, arriving
        if arriving:
            value = join([value, *(exchange.receive(action, route) for route in arriving)])
        if stage_pass.variables is not None:
            run = partial(_run_in, stage_pass.variables.copy(), run)
        if self._profiled:
            run = partial(_within, _profiler_name(action), run)
        if self._forward is not None and action.kind is Kind.FORWARD:
            run = partial(_within, self._forward.entered(), run)
        with self.using:
            start = self._now()
            try:
                result = run(action.i, value)
            except RuntimeError as error:
                check_late_edit(error, stage_pass.stage)
                raise
            self._record((self._w, action, start, self._now()))
        if leaving:
            result = self._send_by_routes(action, result, leaving)
        exchange.send(successor(action), result)

    def _perform_at_once(self, actions: Sequence[Action]) -> None:
        stage_pass = self._passes[actions[0].j]
        try:
            self._run_at_once(stage_pass, actions)
        except BaseException as error:
            stage = stage_pass.stage
            add_note(
                error,
                f"raised in backward of all {self._m} micro-batches, which autograd computes at "
                f"once, on {stage}{stage.layer_raising(error)}",
            )
            raise

    def _run_at_once(self, stage_pass: StagePass, actions: Sequence[Action]) -> None:
        exchange, works = self._exchange, stage_pass.works
        gradients = []
        for action in actions:
            value, leaving = exchange.receive(action), works[action.i].leaving
            if leaving:
                value = join([value, *(exchange.receive(action, route) for route in leaving)])
            gradients.append(value)
        start: Any = self._now()
        try:
            results = stage_pass.backwards([action.i for action in actions], gradients)
        except RuntimeError as error:
            check_late_edit(error, stage_pass.stage)
            raise
        share = (self._now() - start) / len(actions)  # autograd does not say how long each took
        for k, (action, result) in enumerate(zip(actions, results, strict=True)):
            self._record((self._w, action, start + k * share, start + (k + 1) * share))
            if arriving := works[action.i].arriving:
                result = self._send_by_routes(action, result, arriving)
            exchange.send(successor(action), result)

    def _run_alone(self, action: Action) -> None:
        """Run an action without inputs from other stages or results for them."""
        stage_pass = self._passes[action.j]
        run = stage_pass.recompute if action.kind is Kind.RECOMPUTE else stage_pass.weights
        if stage_pass.variables is not None:
            run = partial(_run_in, stage_pass.variables.copy(), run)
        if self._profiled:
            run = partial(_within, _profiler_name(action), run)
        with self.using:
            start = self._now()
            if self._beside_code and action.kind is Kind.RECOMPUTE:
                stage_pass.check_inputs(action.i)
            run(action.i)
            self._record((self._w, action, start, self._now()))

    def _send_gradients(self, action: Action) -> None:
        start = self._now()
        self._passes[action.j].send_gradients()
        self._record((self._w, action, start, self._now()))

    def _send_by_routes(self, by: Action, value: FlatTree, routes: Sequence[Route]) -> FlatTree:
        none = [FlatTree([])] * (1 + len(routes))  # where nothing requires a gradient
        main, *others = parted(value, len(none)) if value.spec is not None else none
        for route, tree in zip(routes, others, strict=True):
            j = route.target if by.kind.direction > 0 else route.source
            self._exchange.send(by._replace(j=j), tree, route)
        return main

    @override
    def _describe(self, action: Action, error: BaseException) -> str:
        stage = self._passes[action.j].stage
        microbatch = f"micro-batch {action.i} of {self._m}"
        return f"{action.kind.verb} of {microbatch} on {stage}{stage.layer_raising(error)}"

    _verbs = {  # noqa: RUF012
        Kind.FORWARD: _pass_on,
        Kind.RECOMPUTE: _run_alone,
        Kind.BACKWARD: _pass_on,
        Kind.WEIGHTS: _run_alone,
        Kind.GRADIENTS: _send_gradients,
    }


class HostWorkerTask(WorkerTask):
    """The task of a worker whose stages have something on their devices only around its use."""

    def __init__(self, whole: Row, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._traffic = HostTraffic(self._w, whole, tuple(self.row), self._passes)

    def _with_traffic(self, action: Action) -> None:
        self._traffic.before(action)
        WorkerTask._verbs[action.kind](self, action)
        self._traffic.after(action)

    _verbs = dict.fromkeys(WorkerTask._verbs, _with_traffic)


def _profiler_name(action: Action) -> Manager:
    """Show what runs in it as an action in PyTorch's profiler: ``stage 1 forward 3``."""
    return record_function(f"stage {action.j} {action.kind.verb} {action.i}")


class _Holding:
    """Holds a lock while a manager is entered, and while it exits."""

    # A class: see Note [Context managers are classes].

    def __init__(self, lock: Manager, manager: Manager) -> None:
        self._lock, self._manager = lock, manager

    def __enter__(self) -> None:
        with self._lock:
            self._manager.__enter__()

    def __exit__(self, *error: Any) -> None:
        with self._lock:
            self._manager.__exit__(*error)


def _run_in(variables: contextvars.Context, run: Callable[..., Any], *args: Any) -> Any:
    return variables.run(run, *args)


def _within(manager: Manager, run: Callable[..., Any], *args: Any) -> Any:
    with manager:
        return run(*args)
