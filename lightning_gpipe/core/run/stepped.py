"""One mini-batch whose loss is computed for each micro-batch, with the caller's code in the middle.

Forwards and backwards alternate in one phase, so a backward needs a loss while others have not
begun. The caller's code runs for each micro-batch on the caller's thread, at the same time as the
workers, or in turns with them on one thread; what it does is a row of the schedule. At the end all
gradients are known, and the loss is returned as one node that hands them over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from lightning_gpipe.core.data import Division
from lightning_gpipe.core.faithful import (
    Context,
    OwnGenerators,
    Randomness,
    SharedGenerators,
    Streams,
    ThreadState,
    TrainingFlags,
    on_engine_thread,
)
from lightning_gpipe.core.plan import Layout, Schedule
from lightning_gpipe.core.run.asides import Unfinished
from lightning_gpipe.core.run.caller import Caller
from lightning_gpipe.core.run.callers_row import CallersRow, first_call
from lightning_gpipe.core.run.clocks import clock_of
from lightning_gpipe.core.run.code import Call, Code
from lightning_gpipe.core.run.draws import Draws
from lightning_gpipe.core.run.gradients import sum_gradients
from lightning_gpipe.core.run.known import with_known_gradients
from lightning_gpipe.core.run.library_draws import LibraryDraws, LibraryWatch
from lightning_gpipe.core.run.passes import Passes, begin_passes
from lightning_gpipe.core.run.stage import Stage
from lightning_gpipe.core.run.surroundings import Surroundings
from lightning_gpipe.core.run.timeline import Timeline
from lightning_gpipe.core.run.ways import Way
from lightning_gpipe.core.run.work import work_of
from lightning_gpipe.core.run.worker import Worker
from lightning_gpipe.core.transport import Transport, Twins

_CODE = -1  # the index of the caller's code where stages have theirs, for its random numbers


class Stepped:
    """Runs the only phase of a schedule, and the caller's code, for one mini-batch.

    Args:
        stages: The stages, in order.
        layout: What runs where.
        schedule: What to run; it has a row for the caller.
        code: The caller's code.
        surroundings: The parameters that it uses.
        context: The caller's thread-local state.
        transport: What connects the workers.
        draws: Records whether layers and code draw random numbers.
        library_draws: Records whether layers do so from Python's or NumPy's generator.
        unfinished: Other mini-batches whose backward has not run.
        training_flags: Which modules of the stages are in training mode.
        division: Tells how many rows each micro-batch has, if that is known.
        way: Whether it runs on the caller's thread, though the transport has threads.
        twins: Knows tensors of the batch that are on the first stage's device already.

    Attributes:
        timeline: What ran when.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        layout: Layout,
        schedule: Schedule,
        code: Code,
        surroundings: Surroundings,
        context: Context,
        *,
        transport: Transport,
        draws: Draws,
        library_draws: LibraryDraws,
        unfinished: Unfinished,
        training_flags: Callable[[], TrainingFlags],
        division: Callable[[], Division | None],
        way: Way,
        twins: Twins | None = None,
    ) -> None:
        self._stages = stages
        self._layout = layout
        self._schedule = schedule
        self._code = code
        self._surroundings = surroundings
        self._context = context
        self._transport = transport
        self._draws = draws
        self._library_draws = library_draws
        self._library: LibraryWatch | None = None
        # The code draws where its thread is, and on the device of what is around the stages.
        self._shared = draws.shared and draws.shared | {layout.outside}
        self._unfinished = unfinished
        self._training_flags = training_flags
        self._flags: TrainingFlags = b""
        self._division = division
        self._way = way
        self._twins = twins
        self._streams = Streams.capture(layout.devices_here)
        self._passes = Passes()
        self._workers: list[Worker] = []
        self.timeline = Timeline(
            schedule,
            [clock_of(self._streams.on(layout.devices[w])) for w in layout.workers_here],
            layout.workers_here,
            layout,
            inline=self._inline,
            caller=clock_of(self._streams.on(layout.outside)),
            computed=way.computed,
        )

    def run(self) -> Tensor | None:
        """Run it.

        Returns:
            The loss, whose backward hands over the gradients; None if the code returned None for
            all micro-batches.
        """
        code, error = self._code, None
        try:
            with self._transport.exclusive(), self._way.timed:
                for stage in self._stages:
                    stage.refresh()
                self._flags = self._training_flags()
                library = self._library = self._library_draws.begin(
                    self._flags, alone=self._inline, recomputed=self._recomputes
                )
                code.watch_by(library.callers)
                self._draws.run_step(
                    self._flags,
                    self._run,
                    generators=SharedGenerators(self._shared),
                    modes=bool(self._context.modes) or self._recomputes,
                )
                library.end()
                self._passes.finish_forward(())
            return None if code.losses.skipped else self._loss()
        except BaseException as raised:
            error = raised
            self._passes.refuse_gradients()
            raise
        finally:
            code.close(error)
            self._passes.release()
            self._workers = []

    def _loss(self) -> Tensor:
        """The loss with all gradients."""
        pairs = [pair for _, taken in self._passes.take_gradients() for pair in taken]
        around = self._surroundings.take_gradients()
        pairs += around + self._aside({id(parameter) for parameter, _ in around})
        leaves = list({id(leaf): leaf for leaf, _ in pairs}.values())
        gradients = sum_gradients(pairs, leaves)
        value, seed = self._code.losses.total()
        known = [(p, g) for p, g in zip(leaves, gradients, strict=True) if g is not None]
        return with_known_gradients(value, known, seed, self._streams)

    def _aside(self, around: set[int]) -> list[tuple[Tensor, Tensor]]:
        """The gradients that the code has of other leaves; in the place of shadows, parameters.

        Args:
            around: The ids of parameters that it used in modules around the stages.

        Raises:
            RuntimeError: If one has several shadows, which the code took for several parameters, or
                is the input of a stage.
        """
        owner_of = {
            id(shadow): (each.stage, parameter)
            for each in self._passes
            for parameter, shadow in each.shadows.pairs
        }
        for each in self._passes:
            each.asides.check_inputs_captured(self._surroundings.aside.keys())
        found: list[tuple[Tensor, Tensor]] = []
        for key, (leaf, gradient) in self._surroundings.aside.items():
            if key not in owner_of:
                found.append((leaf, gradient))
                continue
            stage, owner = owner_of[key]
            if id(owner) in around:
                raise RuntimeError(
                    "training_step must not use all parameters, as for a penalty on the weights, "
                    f"where several modules share one: {stage.name_of(owner)} of {stage} would "
                    "count once for each. Give the optimizer weight_decay, or write "
                    "schedule='fill_drain'."
                )
            around.add(id(owner))
            found.append((owner, gradient))
        return found

    def _run(self, shared: SharedGenerators | None) -> None:
        """Run all, with private generators in the place of ``shared`` ones if any."""
        state = ThreadState.capture()
        code = self._code
        if shared is not None:
            code.draw_by(shared.private(_CODE, grad=True).drawing)
        try:
            with self._surroundings.entered():
                first = first_call(code, self.timeline)
                if first is None:
                    self._run_without_pipeline()
                else:
                    self._run_pipeline(first, shared)
        finally:  # Ctrl-C interrupts this thread, also just before a `with` block exits
            self._surroundings.undo()
            for stage in self._stages if self._inline else ():
                stage.journal.undo()
            state.restore()
        self._context.clear_autocast_cache()

    def _run_without_pipeline(self) -> None:
        """Run the code of the other micro-batches, which skips the batch as that of the first."""
        code = self._code
        for i in range(code.m):
            if i and code.prepare(i) is not None:
                raise RuntimeError(_once(f"none for micro-batch 0, and one for micro-batch {i}"))
            code.skip(i)

    def _run_pipeline(self, first: Call, shared: SharedGenerators | None) -> None:
        self._begin(first, shared)
        transport = self._transport.inline() if self._inline else self._transport
        exchange = transport.open(self._schedule.phase(0))
        context = self._context.without_autocast()
        tasks = [
            worker.task(exchange.phase, exchange, context, self.timeline)
            for worker in self._workers
        ]
        caller = Caller(self._layout.n, first.program, twins=self._twins)
        row = CallersRow(self.timeline, self._code, caller, exchange, self._context, first)
        transport.run(exchange, tasks, row)
        exchange.settle()

    def _begin(self, first: Call, shared: SharedGenerators | None) -> None:
        """Make the passes and the workers."""
        layout, program = self._layout, first.program
        works = [work_of(stage, program) for stage in self._stages]
        signature = self._flags, first.inputs.spec
        watches = [
            stage.watch((*signature, work.signature), self._division)
            for stage, work in zip(self._stages, works, strict=True)
        ]
        self._passes = begin_passes(
            self._stages,
            works,
            self._schedule,
            self._context.for_backward(recomputes=self._recomputes),
            watches,
            partial(self._randomness, shared),
            {},
            spread=False,
            terms=False,
        )
        self._workers = [
            Worker(
                w,
                layout.devices[w],
                self._passes.of(layout.stages_of(w)),
                self._streams,
                self._context,
            )
            for w in layout.workers_here
        ]

    def _randomness(self, shared: SharedGenerators | None, stage: Stage) -> Randomness:
        devices = {torch.device("cpu"), stage.device} - self._shared
        index = stage.partition.index
        private = None if shared is None else shared.private(index, grad=True)
        own = OwnGenerators(devices, None if self._library is None else self._library.saved)
        randomness = Randomness(own, private)
        randomness.begin_backward(None if shared is None else shared.private_in_backward(index))
        return randomness

    @property
    def _inline(self) -> bool:
        """Whether all runs on this thread."""
        inline = self._way.inline or bool(self._context.modes) or on_engine_thread()
        return inline or self._transport is self._transport.inline()

    @property
    def _recomputes(self) -> bool:
        return self._schedule.recomputes


def _once(found: str) -> str:
    return (
        "training_step must call the pipeline once for each micro-batch, or return None without a "
        f"call for all: got {found}. schedule='fill_drain' gives it the whole batch."
    )
