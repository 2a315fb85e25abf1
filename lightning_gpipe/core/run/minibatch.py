"""One mini-batch on its way through the pipeline.

A pipeline lives long and is shared; what belongs to one mini-batch lives here: its schedule, its
pass through each stage, the workers that drive it and the record of what they did. It hangs on the
autograd node of the mini-batch's output and nowhere else, so a forward that is never followed by a
backward frees everything when its output goes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from lightning_gpipe.core.data import FlatTree
from lightning_gpipe.core.faithful import (
    Context,
    OwnGenerators,
    Randomness,
    SharedGenerators,
    Snapshot,
    on_engine_thread,
    together,
)
from lightning_gpipe.core.plan import Action, Kind, Schedule
from lightning_gpipe.core.run.roots import root_of, run_backward
from lightning_gpipe.core.run.stage import Stage
from lightning_gpipe.core.run.stage_pass import StagePass
from lightning_gpipe.core.run.timeline import Timeline
from lightning_gpipe.core.run.worker import Worker
from lightning_gpipe.core.transport import Exchange, Transport

Gradients = list[Tensor | None]


class MiniBatch:
    """Runs the two halves of a schedule for one mini-batch.

    Args:
        stages: The stages, in order.
        devices: The device of each worker.
        schedule: What to run.
        recomputed: The first so many micro-batches are recomputed.
        transport: What connects the workers.
        threads: Whether workers may run on threads of their own.

    Attributes:
        timeline: What ran when.
        parameters: After forward, those that will have a gradient, each once.
        spent: Whether backward has begun.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        devices: Sequence[torch.device],
        schedule: Schedule,
        *,
        recomputed: int,
        transport: Transport,
        threads: bool,
    ) -> None:
        self._stages = stages
        self._devices = devices
        self._schedule = schedule
        self._kept = range(recomputed, schedule.m)
        self._transport = transport
        self._threads = threads and len(devices) > 1
        self._shared_devices = _shared(devices)
        self._context = Context.capture(devices)
        self._passes: list[StagePass] = []
        self._workers: list[Worker] = []
        self._output_gradients: list[Gradients] = []
        self.timeline = Timeline(schedule)
        self.parameters: list[nn.Parameter] = []
        self.spent = False

    def forward(self, microbatches: Sequence[FlatTree]) -> list[FlatTree]:
        """Run the forward half, and return each micro-batch's output on the last device."""
        with self._transport.turn():
            for stage in self._stages:
                stage.refresh()
            try:
                outputs = self._reproducibly(microbatches)
            finally:
                self.rejoin()
            used = set[int]().union(*(each.used for each in self._passes))
            for each in self._passes:
                each.settle()
                if each.watched:
                    each.shadows.keep_used(used)
                if each.statistics is not None:
                    each.statistics.commit()
        self._output_gradients = [[None] * len(output.leaves) for output in outputs]
        every = (p for each in self._passes for p in each.shadows.parameters)
        self.parameters = list({id(parameter): parameter for parameter in every}.values())
        return outputs

    def note_gradient(self, i: int, k: int, gradient: Tensor | None) -> None:
        """Take the gradient of leaf ``k`` of the output of micro-batch ``i``."""
        self._output_gradients[i][k] = gradient

    def backward(self) -> list[Gradients]:
        """Run the backward half, and return the gradients of each micro-batch's input.

        Of a micro-batch in which no input needs one, the list may be empty. The gradients of the
        parameters are taken with :meth:`take_gradients`, within :meth:`on_streams`.
        """
        self.spent = True
        m, n = self._schedule.m, self._schedule.n
        with self._transport.turn():
            exchange = self._transport.open()
            try:
                for each in self._passes:
                    each.check_unchanged()
                for i, gradients in enumerate(self._output_gradients):
                    exchange.send(Action(Kind.BACKWARD, i, n - 1), FlatTree(gradients))
                with self._as_in_forward():
                    # With gradients, as recomputation wants it; backward itself goes without.
                    now = replace(Context.capture(self._devices), grad=True)
                    self._run(self._schedule.backward_half, exchange, now)
            finally:
                self.rejoin()
                for each in self._passes:
                    each.release()
        return [exchange.receive(Action(Kind.BACKWARD, i, -1)).leaves for i in range(m)]

    def _as_in_forward(self) -> ExitStack:
        """Gives the process what recomputation needs of it, and puts its generators back after.

        Layers that checkpoint themselves set and reset a generator that others share.
        """
        stack = ExitStack()
        if self._kept.start:
            stack.enter_context(self._context.default_dtype_set())
        if self._shared_devices:
            stack.callback(SharedGenerators(self._shared_devices).rewind)
        return stack

    def release(self) -> None:
        """Let go of everything, once the gradients were taken: an output may be kept for long."""
        self._output_gradients, self._passes, self._workers = [], [], []
        self.parameters = []

    @contextmanager
    def on_streams(self) -> Iterator[None]:
        """Let a ``with`` block compute where the workers do, and the caller come after it."""
        with ExitStack() as streams:
            for worker in self._workers:
                streams.enter_context(worker.streaming())
            yield
        self.rejoin()

    def rejoin(self) -> None:
        """Let what the caller does next come after what the workers did."""
        for worker in self._workers:
            worker.rejoin()

    def take_gradients(self) -> list[Tensor | None]:
        """The gradients of :attr:`parameters` over all micro-batches and stages, given away."""
        taken: dict[int, tuple[nn.Parameter, list[Tensor]]] = {}
        for each in self._passes:
            for parameter, gradient in each.shadows.take_gradients():
                _, gradients = taken.setdefault(id(parameter), (parameter, []))
                gradients.append(gradient.to(parameter.device))
        found = [_total(taken.pop(id(each), (each, []))[1]) for each in self.parameters]
        for parameter, gradients in taken.values():
            # No forward used it, so it was left out, but a recomputation did: that of another
            # stage, which has it behind the back of nn.Module.
            run_backward([root_of(parameter)], [_total(gradients)])
        return found

    def _reproducibly(self, microbatches: Sequence[FlatTree]) -> list[FlatTree]:
        """Run forward so that what is drawn depends on no timing.

        See Note [Drawing from a private stream].
        """
        if not self._shared_devices:
            return self._forward(microbatches, None)
        shared = SharedGenerators(self._shared_devices)
        if any(stage.draws for stage in self._stages):
            # An operator without a generator of its own moves the shared one and puts it back, and
            # would hide what another stage draws meanwhile for the first time.
            self._expect_draws(self._stages)
        unknown = [stage for stage in self._stages if stage.draws is None]
        snapshot = None
        if self._context.modes:
            # One mode more costs little then, and a counter must not see the forward twice.
            self._expect_draws(unknown)
        elif unknown:
            every = (stage.buffers.all() for stage in self._stages)
            snapshot = Snapshot(every, microbatches, guarded=self._context.grad)
        elif self._context.grad:
            small = (stage.buffers.small() for stage in self._stages)
            snapshot = Snapshot(small, microbatches, guarded=True)

        outputs = self._forward(microbatches, shared)
        if not shared.moved():
            self._note_draws(unknown)
        elif snapshot is not None:
            shared.rewind()
            self._expect_draws(self._stages)
            outputs = self._forward(snapshot.restore(), shared)
            self._note_draws(self._stages)
        else:  # nothing is recomputed: what was drawn is good, if not the same on another run
            shared.rewind()
            shared.advance()
            for stage in self._stages:
                stage.draws = None
        if any(each.randomness.drew for each in self._passes):
            shared.advance()
        return outputs

    def _expect_draws(self, stages: Iterable[Stage]) -> None:
        for stage in stages:
            stage.draws = True

    def _note_draws(self, stages: Collection[Stage]) -> None:
        for each in self._passes:
            if each.stage in stages:
                each.stage.draws = each.randomness.drew

    def _forward(
        self, microbatches: Sequence[FlatTree], shared: SharedGenerators | None
    ) -> list[FlatTree]:
        exchange = self._transport.open()
        self.timeline = Timeline(self._schedule)
        self._passes = [self._begin(stage, shared) for stage in self._stages]
        watched = any(each.shadows.watched for each in self._passes)
        for each in self._passes:
            each.watched = watched
        self._workers = [
            Worker(w, device, self._passes, self.timeline) for w, device in enumerate(self._devices)
        ]
        for i, microbatch in enumerate(microbatches):
            exchange.send(Action(Kind.FORWARD, i, 0), microbatch.detached())
        self._run(self._schedule.forward_half, exchange, self._context)
        n = self._schedule.n
        return [exchange.receive(Action(Kind.FORWARD, i, n)) for i in range(len(microbatches))]

    def _begin(self, stage: Stage, shared: SharedGenerators | None) -> StagePass:
        own = OwnGenerators({torch.device("cpu"), stage.device} - self._shared_devices)
        streams = None
        if shared is not None and stage.draws:
            streams = shared.streams(stage.partition.index, grad=self._context.grad)
        return StagePass(stage, self._context, self._kept, Randomness(own, streams))

    def _run(self, half: Schedule, exchange: Exchange, context: Context) -> None:
        modes = self._context.modes or context.modes  # those of forward are for recomputation
        if self._threads and not modes and not on_engine_thread():
            jobs = [
                partial(context.variables.copy().run, worker.run, row, exchange, context)
                for worker, row in zip(self._workers, half.rows, strict=True)
            ]
            self._transport.run(exchange, jobs)
            return
        prepared = [w.prepared(row) for w, row in zip(self._workers, half.rows, strict=True)]
        try:
            with context.entered(), together(prepared):
                for w, row in half.turns:
                    self._workers[w].run_inline(row, exchange, context)
        finally:  # an interrupt strikes this thread, also where no `with` would notice
            for stage in self._stages:
                stage.journal.undo()
        context.forget_casts()


def _total(gradients: list[Tensor]) -> Tensor | None:
    """The sum; sparse gradients, as embeddings have on request, come last and stay so if alone."""
    if len(gradients) < 2:
        return gradients[0] if gradients else None
    gradients.sort(key=lambda gradient: gradient.is_sparse)
    total = gradients[0]
    for gradient in gradients[1:]:
        total = total.add_(gradient)
    return total


def _shared(devices: Sequence[torch.device]) -> frozenset[torch.device]:
    """The devices whose generator several workers may draw from."""
    if len(devices) == 1:
        return frozenset()
    crowded = {device for device, workers in Counter(devices).items() if workers > 1}
    return frozenset({torch.device("cpu"), *crowded})
