"""The engine: the stages of a layout and a transport between them, ready for mini-batches.

A layout says what runs where, a schedule in which order, a transport carries tensors between
workers. The engine combines them, and holds the recorded behavior of the layers and the threads.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_gpipe.core.data import Division, FlatTree, Term, tree_flatten, tree_unflatten
from lightning_gpipe.core.faithful import (
    NOTHING,
    Context,
    Gather,
    Journal,
    LibraryDraws,
    Manager,
    RandomDraws,
    patched,
)
from lightning_gpipe.core.layout import Layout, ties_of
from lightning_gpipe.core.programs import Program, Route, SkipName
from lightning_gpipe.core.run.agreement import SharedErrors
from lightning_gpipe.core.run.autograd_node import attach
from lightning_gpipe.core.run.divided_weights import DividedWeights
from lightning_gpipe.core.run.gradient_home import GradientHome
from lightning_gpipe.core.run.guards.lost_gradients import UnfinishedMiniBatches
from lightning_gpipe.core.run.guards.shared_objects import SideChannels
from lightning_gpipe.core.run.guards.values_on_layers import ValuesOnLayers
from lightning_gpipe.core.run.micro_batch_losses.losses import Losses
from lightning_gpipe.core.run.micro_batch_losses.outside_gradients import OutsideGradients
from lightning_gpipe.core.run.micro_batch_losses.step_minibatch import StepMiniBatch
from lightning_gpipe.core.run.micro_batch_losses.user_step import Function, UserStep
from lightning_gpipe.core.run.minibatch import MiniBatch
from lightning_gpipe.core.run.minibatch_run import Equipment
from lightning_gpipe.core.run.observe.threads_or_inline import Execution, RunTimes, ThreadsOrInline
from lightning_gpipe.core.run.observe.timeline import Timeline
from lightning_gpipe.core.run.stage import Stage, training_flags_of
from lightning_gpipe.core.run.step_at_last import StepAtLast
from lightning_gpipe.core.schedules import (
    CALLER,
    Action,
    Kind,
    OffloadActivations,
    Schedule,
    fill_drain,
    offloaded_by_stage,
)
from lightning_gpipe.core.transport import (
    BETWEEN,
    NO_RUN,
    TOLD,
    Exchange,
    Label,
    OutOfStep,
    RankFailed,
    Transport,
)

Observer = Callable[[Timeline], None]


class Engine:
    """Runs mini-batches through the stages of a layout, whose layers are on their devices already.

    ``ways`` chooses threads or one thread for each mini-batch; None leaves it to the transport.

    Attributes:
        step: The number of the training's step, if it is known: equal in all processes.
        timeline: The record of the latest mini-batch, or None before the first.
        code: The caller's code, while it runs for each micro-batch.
        at_last: The caller's step whose outputs are for the last stage, while it runs.
    """

    code: UserStep | None = None
    at_last: StepAtLast | None = None

    def __init__(
        self,
        layout: Layout,
        transport: Transport,
        *,
        deferred_batch_norm: bool = True,
        offload_activations: OffloadActivations = False,
        ways: ThreadsOrInline | None = None,
    ) -> None:
        offloads = offloaded_by_stage(offload_activations, layout.n)
        self.stages = tuple(
            Stage(layout, j, deferred_batch_norm=deferred_batch_norm, offloads=offloads[j])
            for j in layout.stages_here
        )
        self.step = 0
        self.timeline: Timeline | None = None
        self.ways = ways
        here = {stage.partition.index: stage for stage in self.stages}
        modules = [
            here.get(j) or partition.modules for j, partition in enumerate(layout.partitions)
        ]
        self._equipment = Equipment(
            self.stages,
            layout,
            transport,
            RandomDraws(layout.devices_here, spread=layout.spread),
            LibraryDraws(),
            UnfinishedMiniBatches(),
            partial(training_flags_of, modules),
            self._workers_with_visits(layout),
        )
        self._side_channels = SideChannels(layout.partitions)
        self._values_on_layers = [
            ValuesOnLayers([here[j].partition for j in module if j in here])
            for module in layout.modules
        ]
        self._parameters = sum(
            parameter.numel()
            for partition in layout.partitions
            for parameter in partition.parameters
        )
        self._transport = transport
        self._observers: OrderedDict[int, Observer] = OrderedDict()
        self._journal = Journal()  # of modules around the stages
        self._gathers: Sequence[Gather] = ()

    @property
    def home(self) -> GradientHome | None:
        return self._equipment.home

    @home.setter
    def home(self, home: GradientHome | None) -> None:
        self._equipment = self._equipment._replace(home=home)

    @property
    def sends_gradients(self) -> bool:
        """True if gradients go home, to the host or over replicas, after a last backward."""
        equipment = self._equipment
        return equipment.home is not None or bool(equipment.layout.away_from_weights)

    @property
    def layout(self) -> Layout:
        return self._equipment.layout

    @layout.setter
    def layout(self, layout: Layout) -> None:
        self._equipment = self._equipment._replace(layout=layout)
        for stage in self.stages:
            stage.follow(layout)

    def divide(self, layout: Layout, weights: DividedWeights) -> None:
        """Gather weights of stages from replicas from now on; those away have the home ``meta``."""
        for stage in self.stages:
            stage.divide(weights, layout)
        self._equipment = self._equipment._replace(
            layout=layout, workers_with_visits=self._workers_with_visits(layout)
        )

    def _workers_with_visits(self, layout: Layout) -> frozenset[int]:
        visited = (stage.partition.index for stage in self.stages if stage.has_visits)
        return frozenset(layout.placement[j] for j in visited)

    def run(
        self,
        microbatches: Sequence[FlatTree],
        schedule: Schedule,
        program: Program,
        division: Callable[[], Division | None] = lambda: None,
        *,
        terms: bool = False,
    ) -> tuple[list[FlatTree], list[list[Term]]]:
        """Run the micro-batches, each joined of the values of the program's inputs.

        ``division`` returns the number of rows of each, if it is known. Return the output of each
        micro-batch, joined of the values of the program's outputs, and with ``terms`` the loss
        terms of its layers in their order; both in the caller's graph.
        """
        equipment = self._equipment
        context = Context.capture(equipment.layout.devices_here)
        minibatch = MiniBatch(
            equipment,
            schedule,
            program,
            context,
            label=self._label,
            execution=self._execution(microbatches, schedule, program),
            terms=terms,
        )
        if self.at_last is not None:
            self.at_last.begin_call()
        forward = partial(minibatch.forward, microbatches, division, context)
        outputs = self._side_channels.watch(forward)
        self._observe(minibatch.timeline)
        if self.at_last is not None:
            outputs = self.at_last.outputs(minibatch, microbatches, outputs)
        else:
            outputs = attach(minibatch, microbatches, outputs)
        return minibatch.caller.split(outputs)

    def run_code(
        self,
        function: Function,
        schedule: Schedule,
        losses: Losses,
        modules: Iterable[nn.Module],
        division: Callable[[], Division | None],
    ) -> tuple[Tensor | None, list[Any]]:
        """Run the caller's code for each micro-batch, with forwards and backwards in one phase.

        ``function`` calls :meth:`UserStep.call` of :attr:`code`; it uses ``modules``, those of the
        stages among them, whose hooks see the sums of gradients. Return the loss, whose backward
        hands them over, or None if the code skips the batch; and the detached result of each call.
        """
        with self._transport.exclusive():
            self._equipment.unfinished.settle()
            outside = OutsideGradients(modules, self._journal)
            context = Context.capture(self.layout.devices_here)
            execution = Execution([])
            if self.ways is not None:
                work = self._parameters / schedule.n
                execution = self.ways.next(schedule, 1, schedule.m * schedule.n, work)
            if self.at_last is not None:
                self.at_last.begin_call()
                schedule = schedule.caller_of(self.at_last.kinds)
            values = self._values_on_layers
            starts = self.layout.starts
            code = UserStep(function, schedule.m, losses, context, outside, values, starts)
            minibatch = StepMiniBatch(
                self._equipment,
                schedule,
                code,
                outside,
                context,
                label=self._label,
                execution=execution,
                division=division,
            )
            self.code = code
            try:
                loss = self._side_channels.watch(minibatch.run)
            finally:
                self.code = None
                for each in values:
                    each.end()
        self._observe(minibatch.timeline)
        return loss, code.results

    @property
    def _label(self) -> Label:
        at_last = 0 if self.at_last is None else TOLD if self.at_last.told else 1
        return Label(minibatch=self._transport.begun, step=self.step, at_last=at_last)

    def _observe(self, timeline: Timeline) -> None:
        self.timeline = timeline
        for observer in list(self._observers.values()):
            observer(timeline)

    @property
    def found_way(self) -> RunTimes | None:
        """The measured times with and without threads for the kind of the latest mini-batch."""
        return None if self.ways is None else self.ways.times

    def _execution(
        self, microbatches: Sequence[FlatTree], schedule: Schedule, program: Program
    ) -> Execution:
        if self.ways is None:
            return Execution([])
        tensors = [leaf for leaf in microbatches[0].leaves if isinstance(leaf, Tensor)]
        grad, size = torch.is_grad_enabled(), sum(tensor.numel() for tensor in tensors)
        rows = max((tensor.shape[0] for tensor in tensors if tensor.dim()), default=1)
        # Equal for mini-batches whose sizes differ by a factor of four at most.
        kind = grad, schedule.m, size.bit_length() // 2, program.fingerprint
        work = rows * self._parameters / schedule.n
        return self.ways.next(kind, 1 + grad, schedule.m * schedule.n, work)

    def everywhere(self, j: int, compute: Callable[[], Any], *, phase: int = BETWEEN) -> Any:
        """Return in all processes what ``compute`` returns, a pytree, in that of stage ``j``.

        All processes call this in the same order, and raise if ``compute`` raises.
        """
        layout, transport = self.layout, self._transport
        if not layout.spread:
            with self.undisturbed:
                return compute()
        if self.at_last is not None:
            self.at_last.before_answer()
        with self.telling():
            code = self.code
            if code is not None and code.exchange is not None:  # which is open while it runs
                return self._told(code.exchange, j, compute, next(code.answers))
            label = self._label._replace(phase=phase)
            exchange = transport.open(fill_drain(1, layout.placement).phase(0), label)
            result = self._told(exchange, j, compute)
            exchange.settle()
        return result

    def rehearse(self, j: int, compute: Callable[[], Any]) -> Any:
        """As :meth:`everywhere`, for a function that runs layers of stage ``j`` as they are.

        They get the values of parameters that they share with stages of other processes, and
        arbitrary ones in the place of weights that another replica keeps.
        """
        layout = self.layout
        ties = [tie for tie in ties_of(layout) if tie.home != CALLER and j in tie.followers]
        values = {
            id(tie.parameter): self.everywhere(tie.home, tie.parameter.detach) for tie in ties
        }

        def run() -> Any:
            slots = [
                (module._parameters, name, _filled(p, values.get(id(p)), layout.device_of(j)))
                for module in layout.partitions[j].modules
                for name, p in module._parameters.items()
                if p is not None and p.is_meta
            ]
            with patched(slots):
                return compute()

        return self.everywhere(j, run)

    def _told(self, exchange: Exchange, j: int, compute: Callable[[], Any], number: int = 0) -> Any:
        """Return the same as :meth:`everywhere`, by an open exchange."""
        layout, to = self.layout, Action(Kind.FORWARD, 0, self.layout.n)
        route = Route(SkipName(None, f"answer {number}"), source=j, target=layout.n)
        if layout.owner_of(j) == layout.rank:
            with self.undisturbed:
                answer = compute()
            exchange.send_to_all(to, tree_flatten(answer), route)
        return tree_unflatten(exchange.receive(to, route))

    @property
    def undisturbed(self) -> Manager:
        """A ``with`` block in which no worker uses the modules, beside code that they run with."""
        return NOTHING if self.code is None else self.code.undisturbed

    def busy(self, j: int) -> bool:
        """Return True if workers may use modules of stage ``j`` while the calling code runs."""
        return self.code is not None and j in self.code.at_work

    @property
    def serial(self) -> int:
        """A number that changes when a mini-batch begins or fails."""
        return self._transport.serial

    def check_run(self, since: int) -> None:
        """Raise OutOfStep if only another process began a mini-batch since ``serial`` was this."""
        if self.layout.spread and self.serial == since:
            self.everywhere(0, lambda: None, phase=NO_RUN)

    def observe(self, observer: Observer) -> RemovableHandle:
        """Call ``observer`` with the timeline of each mini-batch, to which backward adds later."""
        handle = RemovableHandle(self._observers)
        self._observers[handle.id] = observer
        return handle

    @property
    def idle(self) -> bool:
        """True if no mini-batch waits for its backward."""
        return not self._equipment.unfinished.awaited

    def succeed(self, other: Engine) -> None:
        """Take the place of another engine: its step and observers, whose handles hold."""
        self.step = other.step
        self._observers = other._observers
        self.synchronise(other._gathers)

    @property
    def synchronises(self) -> bool:
        """True if batch norms normalise by the rows of all replicas."""
        return bool(self._gathers)

    def synchronise(self, gathers: Sequence[Gather]) -> None:
        """Let batch norms normalise by the rows of all replicas, with a gather for each worker."""
        self._gathers = gathers
        for gather, worker in zip(gathers, self.layout.workers_here, strict=False):
            for stage in self.stages:
                if self.layout.placement[stage.partition.index] == worker:
                    stage.gather = gather

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Leave no record of mini-batches in a ``with`` block, and call no observers.

        All processes get their outputs, and the gradients of stages stay in this process.
        """
        before = self.timeline, self._observers, self.at_last, self.home
        try:
            self._observers, self.at_last, self.home = OrderedDict(), None, None
            with self._equipment.draws.unchanged():
                yield
        finally:
            self.timeline, self._observers, self.at_last, self.home = before

    @contextmanager
    def outputs_at_last(self) -> Iterator[StepAtLast]:
        """Give the output of the only call in a ``with`` block to the process of the last stage."""
        self.at_last = StepAtLast(self.layout)
        try:
            yield self.at_last
        finally:
            self.at_last.end()
            self.at_last = None

    def exclusive(self) -> AbstractContextManager[None]:
        return self._transport.exclusive()

    def tell(self, error: BaseException) -> None:
        self._transport.tell(error)

    def failure(self, within: float) -> RankFailed | OutOfStep | None:
        return self._transport.failure(within)

    def on_lost_wait(self, act: Callable[[], None]) -> None:
        self._transport.on_lost_wait(act)

    def explain(self, cause_of: Callable[[BaseException], BaseException]) -> None:
        self._transport.explain(cause_of)

    def telling(self) -> SharedErrors:
        return SharedErrors(self._transport)

    def close(self) -> None:
        """Close the transport; the next mini-batch opens it again."""
        self._transport.close()


def _filled(parameter: nn.Parameter, value: Tensor | None, device: torch.device) -> nn.Parameter:
    """Return a parameter with a value, or an arbitrary one, always the same, on a device."""
    if value is None:
        value = torch.zeros(parameter.shape, dtype=parameter.dtype, device=device)
        if parameter.is_floating_point():
            value.normal_(generator=torch.Generator(device).manual_seed(0))
            value /= max(parameter.shape[-1:].numel(), 1) ** 0.5
    return nn.Parameter(value.to(device), parameter.requires_grad)
