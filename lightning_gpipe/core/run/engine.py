"""The engine: the stages of a layout and a transport between them, ready for mini-batches.

A layout says what runs where, a schedule in which order, a transport carries tensors between
workers. The engine combines them, and keeps what lasts from one mini-batch to the next: the
recorded behavior of the layers, and the threads.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from lightning_gpipe.core.data import Division, FlatTree, Term
from lightning_gpipe.core.faithful import Context, Journal, TrainingFlags
from lightning_gpipe.core.plan import Layout, Program, Schedule
from lightning_gpipe.core.run.asides import Unfinished
from lightning_gpipe.core.run.autograd import attach
from lightning_gpipe.core.run.code import Code, Function
from lightning_gpipe.core.run.draws import Draws
from lightning_gpipe.core.run.library_draws import LibraryDraws
from lightning_gpipe.core.run.losses import Losses
from lightning_gpipe.core.run.minibatch import MiniBatch
from lightning_gpipe.core.run.side_channels import SideChannels
from lightning_gpipe.core.run.stage import Stage, modules_in
from lightning_gpipe.core.run.stepped import Stepped
from lightning_gpipe.core.run.surroundings import Surroundings
from lightning_gpipe.core.run.telling import Telling, everywhere
from lightning_gpipe.core.run.timeline import Timeline
from lightning_gpipe.core.run.ways import Found, Way, Ways
from lightning_gpipe.core.transport import (
    BETWEEN,
    NO_RUN,
    Label,
    RankFailed,
    Transport,
    Twins,
)

Observer = Callable[[Timeline], None]


class Engine:
    """Runs mini-batches through the stages of a layout.

    Args:
        layout: What runs where; the layers are on their devices already.
        transport: What connects the workers.
        deferred_batch_norm: Whether batch norms update their statistics once per mini-batch.
        ways: Chooses for each mini-batch whether a thread runs each worker; None leaves it to the
            transport.

    Attributes:
        stages: The stages of this process, in order.
        step: The number of the training's step, if it is known: equal in all processes.
        timeline: What ran when in the latest mini-batch, or None before the first.
        ways: As given.
        twins: Knows tensors of the batch that are on the first stage's device already, or None.
        code: The caller's code, while that runs for each micro-batch.
    """

    twins: Twins | None = None
    code: Code | None = None

    def __init__(
        self,
        layout: Layout,
        transport: Transport,
        *,
        deferred_batch_norm: bool = True,
        ways: Ways | None = None,
    ) -> None:
        self.stages = tuple(
            Stage(layout, j, deferred_batch_norm=deferred_batch_norm) for j in layout.stages_here
        )
        self.step = 0
        self.timeline: Timeline | None = None
        self.ways = ways
        self._unfinished = Unfinished()
        here = {stage.partition.index: stage for stage in self.stages}
        self._modules = [
            here.get(j) or modules_in(partition) for j, partition in enumerate(layout.partitions)
        ]
        self._draws = Draws(layout.devices_here, spread=layout.spread)
        self._library_draws = LibraryDraws()
        self._side_channels = SideChannels(layout.partitions)
        self._layout = layout
        self._parameters = sum(
            parameter.numel()
            for partition in layout.partitions
            for parameter in partition.parameters
            if not is_lazy(parameter)
        )
        self._transport = transport
        self._observers: OrderedDict[int, Observer] = OrderedDict()
        self._journal = Journal()  # of the modules around the stages

    @property
    def layout(self) -> Layout:
        """What runs where."""
        return self._layout

    @layout.setter
    def layout(self, layout: Layout) -> None:
        self._layout = layout
        for stage in self.stages:
            stage.follow(layout)

    def run(
        self,
        microbatches: Sequence[FlatTree],
        schedule: Schedule,
        division: Callable[[], Division | None] = lambda: None,
        *,
        terms: bool = False,
        program: Program | None = None,
    ) -> tuple[list[FlatTree], list[list[Term]]]:
        """Run the micro-batches by ``schedule``.

        Args:
            microbatches: The micro-batches.
            schedule: What to run.
            division: Tells how many rows each has, if that is known.
            terms: Whether to collect loss terms.
            program: What the stages run, if that is not their layers. The micro-batches are then
                joined of the values of its inputs in order, and so are the outputs.

        Returns:
            For each micro-batch its output, and the loss terms of its layers in their order; both
            in the caller's graph.
        """
        minibatch = MiniBatch(
            self.stages,
            self._layout,
            schedule,
            program,
            transport=self._transport,
            draws=self._draws,
            terms=terms,
            twins=self.twins,
            library_draws=self._library_draws,
            unfinished=self._unfinished,
            training_flags=self._training_flags,
            label=Label(minibatch=self._transport.begun, step=self.step),
            way=self._way(microbatches, schedule, program),
        )
        shared = self._side_channels.begin()
        try:
            outputs = minibatch.forward(microbatches, division)
        finally:  # what is shared may be why it fails
            self._side_channels.end(shared)
        self.timeline = minibatch.timeline
        for observer in list(self._observers.values()):
            observer(minibatch.timeline)
        outputs = attach(minibatch, microbatches, outputs)
        return minibatch.caller.split(outputs)

    def run_code(
        self,
        function: Function,
        schedule: Schedule,
        losses: Losses,
        around: Iterable[nn.Module],
        division: Callable[[], Division | None] = lambda: None,
    ) -> tuple[Tensor | None, list[Any]]:
        """Run the caller's code for each micro-batch, with forwards and backwards in one phase.

        Args:
            function: Runs it for a micro-batch; it calls :meth:`Code.call` of :attr:`code`.
            schedule: What to run; has a row for the caller.
            losses: What the code returns.
            around: The modules around the stages, whose parameters it may use.
            division: Tells how many rows each micro-batch has, if that is known.

        Returns:
            The loss, whose backward hands over the gradients, or None if the code skips the batch;
            and what it returned for each micro-batch, detached.
        """
        with self._transport.exclusive():
            self._unfinished.settle()
            surroundings = Surroundings(around, self._layout.outside, self._journal)
        context = Context.capture(self._layout.devices_here)
        code = Code(function, schedule.m, losses, context, surroundings)
        stepped = Stepped(
            self.stages,
            self._layout,
            schedule,
            code,
            surroundings,
            context,
            transport=self._transport,
            draws=self._draws,
            library_draws=self._library_draws,
            unfinished=self._unfinished,
            training_flags=self._training_flags,
            division=division,
            way=self._way_of_code(schedule),
            twins=self.twins,
        )
        shared = self._side_channels.begin()
        self.code = code
        try:
            loss = stepped.run()
        finally:
            self.code = None
            self._side_channels.end(shared)
        self.timeline = stepped.timeline
        for observer in list(self._observers.values()):
            observer(stepped.timeline)
        return loss, code.results

    @property
    def found_way(self) -> Found | None:
        """What was found of both ways for the kind of the latest mini-batch, if it is known."""
        return None if self.ways is None else self.ways.found

    def _way(
        self, microbatches: Sequence[FlatTree], schedule: Schedule, program: Program | None
    ) -> Way:
        """How a mini-batch runs whose loss is its own."""
        if self.ways is None:
            return Way([])
        grad, size = torch.is_grad_enabled(), _elements_of(microbatches[0])
        of = 0 if program is None else program.fingerprint
        # Equal for mini-batches whose sizes differ by a factor of four at most.
        kind = grad, schedule.m, size.bit_length() // 2, of
        work = _rows_of(microbatches[0]) * self._parameters / schedule.n
        return self.ways.next(kind, 1 + grad, schedule.m * schedule.n, work, schedule.bubble)

    def _way_of_code(self, schedule: Schedule) -> Way:
        """How a mini-batch runs whose micro-batches have losses, of as many rows as they may."""
        if self.ways is None:
            return Way([])
        return self.ways.next(schedule, 1, schedule.m * schedule.n, self._parameters / schedule.n)

    def everywhere(self, j: int, compute: Callable[[], Any]) -> Any:
        """What ``compute`` returns in the process of stage ``j``, in all processes.

        All of them call this, in the same order. The others do not compute.

        Raises:
            BaseException: What ``compute`` raises, in the process of the stage.
            RankFailed: In the other processes, if it does.
        """
        label = Label(minibatch=self._transport.begun, phase=BETWEEN, step=self.step)
        return everywhere(self._transport, self._layout, label, j, compute)

    @property
    def serial(self) -> int:
        """Another number once a mini-batch has begun, or has failed."""
        return self._transport.serial

    def check_run(self, since: int) -> None:
        """Compare with other processes, if none has begun here since :attr:`serial` was this.

        Raises:
            OutOfStep: If one has begun in another process.
        """
        if self._layout.spread and self.serial == since:
            label = Label(minibatch=self._transport.begun, phase=NO_RUN, step=self.step)
            everywhere(self._transport, self._layout, label, 0, lambda: None)

    def _training_flags(self) -> TrainingFlags:
        """Which modules of all stages are in training mode, those of other processes too."""
        return b"".join(
            [
                each.training_flags
                if isinstance(each, Stage)
                else bytes([module.training for module in each])
                for each in self._modules
            ]
        )

    def observe(self, observer: Observer) -> RemovableHandle:
        """Call ``observer`` with the timeline of each mini-batch once its forward has ended.

        The backward is added to the timeline later.

        Returns:
            A handle whose ``remove()`` ends the calls.
        """
        handle = RemovableHandle(self._observers)
        self._observers[handle.id] = observer
        return handle

    @property
    def idle(self) -> bool:
        """Whether no mini-batch waits for its backward."""
        return not self._unfinished.awaited

    def succeed(self, other: Engine) -> None:
        """Take the place of another engine: its step, twins, and observers, whose handles hold."""
        self.step, self.twins = other.step, other.twins
        self._observers = other._observers

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Keep no record of what runs in a ``with`` block, and call no observers."""
        timeline, observers = self.timeline, self._observers
        try:
            self._observers = OrderedDict()
            with self._draws.unchanged():
                yield
        finally:
            self.timeline, self._observers = timeline, observers

    def exclusive(self) -> AbstractContextManager[None]:
        """A ``with`` block in which no other thread runs mini-batches."""
        return self._transport.exclusive()

    def tell(self, error: BaseException) -> None:
        """Tell other processes of an error in the caller's code."""
        self._transport.tell(error)

    def failure(self, within: float) -> RankFailed | None:
        """How another process has failed since the last step, see :meth:`Transport.failure`."""
        return self._transport.failure(within)

    def when_in_vain(self, act: Callable[[], None]) -> None:
        """Call ``act`` when waits are in vain, see :meth:`Transport.when_in_vain`."""
        self._transport.when_in_vain(act)

    def telling(self) -> Telling:
        """A ``with`` block whose errors other processes are told."""
        return Telling(self._transport)

    def close(self) -> None:
        """Close the transport; the next mini-batch opens it again."""
        self._transport.close()

    def __getstate__(self) -> dict[str, Any]:
        return {
            **self.__dict__,
            "timeline": None,
            "twins": None,
            "code": None,
            "_observers": OrderedDict(),
        }


def _rows_of(flat: FlatTree) -> int:
    """The number of rows of a micro-batch, the most of its tensors."""
    sizes = [leaf.shape[0] for leaf in flat.leaves if isinstance(leaf, Tensor) and leaf.dim()]
    return max(sizes, default=1)


def _elements_of(flat: FlatTree) -> int:
    return sum(leaf.numel() for leaf in flat.leaves if isinstance(leaf, Tensor))
