"""One mini-batch with a loss for each micro-batch, computed by the caller's code.

Forwards and backwards alternate in one phase. The caller's code is a row of the schedule, on the
caller's thread, at the same time as the workers or in turns with them. At the end all gradients are
known, and the loss is returned as one node that hands them over.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

from torch import Tensor

from lightning_gpipe.core.data import Division
from lightning_gpipe.core.faithful import Context, SharedGenerators, ThreadState, together
from lightning_gpipe.core.run.agreement import SharedErrors
from lightning_gpipe.core.run.backward.sums import Pair, sum_gradients
from lightning_gpipe.core.run.micro_batch_losses.caller_task import (
    CallerTask,
    call_missing,
    first_call,
)
from lightning_gpipe.core.run.micro_batch_losses.losses import (
    Total,
    multiply,
    with_known_gradients,
)
from lightning_gpipe.core.run.micro_batch_losses.outside_gradients import OutsideGradients
from lightning_gpipe.core.run.micro_batch_losses.user_step import Call, UserStep
from lightning_gpipe.core.run.minibatch_run import Equipment, MiniBatchRun
from lightning_gpipe.core.run.observe.threads_or_inline import Execution
from lightning_gpipe.core.schedules import Schedule, successor
from lightning_gpipe.core.transport import Label

_CODE = -1  # the index of the caller's code where stages have theirs, for its random numbers


class StepMiniBatch(MiniBatchRun):
    """Runs the only phase of a schedule, and the caller's code, for one mini-batch."""

    def __init__(
        self,
        equipment: Equipment,
        schedule: Schedule,
        code: UserStep,
        outside: OutsideGradients,
        context: Context,
        *,
        label: Label,
        execution: Execution,
        division: Callable[[], Division | None],
    ) -> None:
        super().__init__(equipment, schedule, execution, context, label)
        self._code = code
        self._outside = outside
        self._context = context
        self.by_caller = code.is_current
        layout = equipment.layout
        code.ends_elsewhere = bool(label.at_last) and not (layout.first_here and layout.last_here)
        self._division = division
        self._pairs: list[Pair] = []  # of the stages here, once their backwards have ended
        self._total: Total | None = None
        # The code draws where its thread is, and on the device of what is around the stages.
        self.shared = self.shared and self.shared | {layout.outside}
        self.choose_transport(context.modes)
        self.begin_timeline(caller=True)

    def run(self) -> Tensor | None:
        """Run the phase; return the loss, None if the code returned None for all micro-batches."""
        code = self._code
        try:
            with SharedErrors(self.equipment.transport), self.session():
                self.begin()
                generators = self.agreement.generators = SharedGenerators(self.shared)
                library = self.begin_library_watch()
                code.watched = library.callers
                self.equipment.draws.run_once(
                    "step",
                    self.flags,
                    self._run_step,
                    generators=generators,
                    modes=bool(self._context.modes) or self.schedule.recomputes,
                )
                library.end()
                self.finish_forward(self.agreement.ties.everywhere)
            return None if self._total is None else self._loss(self._total)
        except BaseException as error:
            code.close(error)
            raise
        finally:
            self.release()

    def _loss(self, total: Total) -> Tensor:
        pairs = self._pairs + self._outside_gradients()
        seed = total.seed
        if self.transfer is not None:
            seed = total.scale
            if (factor := total.correction) is not None:
                multiply([gradient for _, gradient in pairs], factor)
            pairs += self.transfer.receive()
        leaves = list({id(leaf): leaf for leaf, _ in pairs}.values())
        gradients = sum_gradients(pairs, leaves)
        known = [(p, g) for p, g in zip(leaves, gradients, strict=True) if g is not None]
        if not total.requires_grad:
            return total.value
        return with_known_gradients(total.value, known, seed, self.streams)

    def _outside_gradients(self) -> list[Pair]:
        """Return the gradients that do not come from stages, of parameters in place of shadows."""
        pairs = self._outside.take_gradients()
        for stage_pass in self.passes:
            stage_pass.lost_gradients.check_inputs_captured({id(leaf) for leaf, _ in pairs})
        owner_of = self._owners()
        return [(owner_of.get(id(leaf), leaf), gradient) for leaf, gradient in pairs]

    def _owners(self) -> dict[int, Tensor]:
        pairs = (pair for stage_pass in self.passes for pair in stage_pass.shadows.pairs)
        return {id(shadow): parameter for parameter, shadow in pairs}

    def _end_losses(self) -> None:
        """Let the gradients go home, now that the weights of all losses are known."""
        self._total = self._code.losses.total()
        self._send_gradients()

    def _send_gradients(self) -> None:
        if self.transfer is None or self._total is None:
            return
        owner_of = self._owners()
        outside = chain(self._outside.leaves, self._code.leaves_before_calls())
        ids = {id(owner_of.get(id(leaf), leaf)) for leaf in outside}
        self.transfer.open(ids, self._total.correction)

    def _run_step(self, generators: SharedGenerators | None) -> None:
        state = ThreadState.capture()
        code = self._code
        if generators is not None:
            code.drawing = generators.private(_CODE, grad=True).drawing
        try:
            with self._outside.without_hooks():
                first = first_call(code, self.timeline)
                if first is None:
                    self._run_without_pipeline()
                else:
                    self._outside.check_slots()
                    self._run_pipeline(first, generators)
                self._outside.check()
        finally:  # Ctrl-C interrupts this thread, also just before a `with` block exits
            self._outside.undo()
            if self.inline:
                self.undo()
            state.restore()
        self._context.clear_autocast_cache()

    def _run_without_pipeline(self) -> None:
        """Run the code for the other micro-batches, which must skip the batch as the first did."""
        code = self._code
        for i in range(code.m):
            if i and code.prepare(i) is not None:
                raise call_missing(f"none for micro-batch 0, and one for micro-batch {i}")
            code.skip(i)

    def _set_call(self, call: Call, i: int | None) -> None:
        """Let the stages of a call run its program for micro-batch ``i``, for None by default."""
        program, terms = call.program, call.terms
        passes = [x for x in self.passes if x.stage.partition.index in program.stages]
        if i is not None:
            for each in passes:
                each.set_program(i, program, terms=terms)
            return
        stages = [each.stage for each in passes]
        works = self.works_of(stages, program, call.inputs, self._division, terms=terms)
        for each, work in zip(passes, works, strict=True):
            each.begin(*work, variables=call.variables)

    def _run_pipeline(self, first: Call, generators: SharedGenerators | None) -> None:
        layout = self.equipment.layout
        self.agreement.agree(first.program, self._code.m, self.flags, grad=True)
        self.begin_work(first.program, first.inputs, self._division, terms=first.terms)
        exchange = self._code.exchange = self.agreement.open(self.transport, 0)
        # Layers find the context variables that the code has set before its call.
        context = self._context._replace(variables=first.variables)
        self.context = context.for_backward(recomputes=self.schedule.recomputes)
        self.begin_passes(generators, self.agreement.ties.values(exchange))
        home = self.equipment.home
        self.transfer = None if home is None else home.begin()
        self.begin_backward(generators)
        # The others of this process get their first value from the caller, or from those told. On
        # one thread the caller's row comes first anyway.
        told = layout.stages_here if layout.spread else layout.starts[1:]
        told = () if self.inline else told
        tasks = self.tasks(exchange, context.without_autocast(), context, told=told)
        self._code.trained = [p for each in self.passes for p in each.shadows.parameters]
        self._code.undisturbed = together([task.using for task in tasks])
        caller_task = CallerTask(
            self.timeline,
            self._code,
            exchange,
            self._context,
            first,
            self._set_call,
            told,
            self._end_losses,
        )
        try:
            first.variables.copy().run(self.transport.run, exchange, tasks, caller_task)
        finally:
            self.settle()
        self.agreement.tell(exchange, self._total)  # at once, while others are at work
        if not self.agreement.gets_gradients:
            exchange.receive_end()
        end = successor(self.schedule.last_backwards[-1])
        self._pairs = self.agreement.ties.gradients(exchange, end, self.take_gradients())
        if (total := self.agreement.told(exchange, self._total)) is not self._total:
            self._total = total
            self._send_gradients()
        self.agreement.end(exchange)
