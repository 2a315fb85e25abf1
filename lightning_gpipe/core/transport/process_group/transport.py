"""Workers in several processes, and the values of a phase, some of which cross to others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from torch import Tensor
from typing_extensions import override

from lightning_gpipe.core.data import FlatTree
from lightning_gpipe.core.faithful import NOTHING
from lightning_gpipe.core.layout import Layout
from lightning_gpipe.core.programs import Route, SkipName, sender
from lightning_gpipe.core.schedules import CALLER, Action, Schedule
from lightning_gpipe.core.transport.copies import Copies, Parcel
from lightning_gpipe.core.transport.inline import InlineTransport
from lightning_gpipe.core.transport.interface import (
    Exchange,
    Label,
    OutOfStep,
    OutputElsewhere,
    RankFailed,
    RunCancelled,
    Task,
    Transport,
)
from lightning_gpipe.core.transport.local import LocalExchange, LocalTransport
from lightning_gpipe.core.transport.process_group.connecting.gpus import GpuTable
from lightning_gpipe.core.transport.process_group.connecting.shared_connections import Connection
from lightning_gpipe.core.transport.process_group.gradients_ahead import (
    Forms,
    GradientsAhead,
    KnownForms,
)
from lightning_gpipe.core.transport.process_group.ledger import Failure, names_of
from lightning_gpipe.core.transport.process_group.mismatch import PHASES, difference
from lightning_gpipe.core.transport.process_group.wire.message import Header, Mail, MessageCode
from lightning_gpipe.core.transport.process_group.wire.tensor_bytes import GpuPair, is_dense

_END = Route(SkipName(None, "end"), CALLER, CALLER)  # of a phase, for those who get no result


class ProcessGroupExchange(LocalExchange):
    """One inbox for each worker of this process, and one for its caller.

    The caller's code runs in each process, on the same values. So the caller sends to the workers
    of its own process only, and results go to all callers.

    With outputs for the last stage, the caller's code goes on in the process of that stage only,
    and sends to the workers of all processes. Outputs go to that process, gradients of inputs to
    that of the first stage, and the others learn of the end of a phase.
    """

    def __init__(
        self,
        layout: Layout,
        phase: Schedule,
        label: Label,
        awaited: Collection[Action] | None,
        copies: Copies,
        connection: Connection,
        forms: KnownForms,
    ) -> None:
        super().__init__(layout, phase, copies)
        self._layout = layout
        self._awaited = awaited
        self._pipelines = connection.pipelines
        self._office = connection.office
        self._links = connection.office.links
        self._gpus = connection.gpus
        self._ahead = GradientsAhead(layout, phase, forms, self._links)
        self._error: RankFailed | OutOfStep | None = None
        self._bits: Callable[[], int] = int
        self._signalled = 0
        self._holds = False
        self._label = label
        self._at_last = bool(label.at_last)
        self._numbers = {route: number for number, route in enumerate(layout.routes)}
        self.purpose = f"{PHASES[label.phase]} of a mini-batch"
        serial, failure = self._office.begin(self)
        if failure is not None:
            raise self._error_of(failure)
        self._header = Header(MessageCode.VALUES, serial, label)

    @override
    def signal(self, bits: Callable[[], int]) -> None:
        self._bits = bits

    @override
    def send(self, to: Action, value: FlatTree, skip: Route | None = None) -> None:
        layout = self._layout
        if 0 <= to.j < layout.n:
            owner = layout.owner_of(to.j)
            place = sender(to, skip)
            if owner == layout.rank:
                super().send(to, value, skip)
            elif 0 <= place < layout.n or (self._at_last and place == layout.n):
                self._post(owner, to, value, skip)
        elif self._awaited is not None and to not in self._awaited:
            pass
        elif self._at_last:
            self._send_to_reader(to, value, skip)
        else:
            self._send_result(to, value, skip)

    @override
    def send_as_told(self, to: Action, value: FlatTree, skip: Route | None = None) -> None:
        layout = self._layout
        owner = layout.owner_of(to.j)
        if owner in layout.ends:
            self.send(to, value, skip)
        elif layout.first_here:
            self._post(owner, to, value, skip)

    @override
    def send_to_all(self, to: Action, value: FlatTree, route: Route) -> None:
        self._send_result(to, value, route)

    def _send_result(self, to: Action, value: FlatTree, skip: Route | None) -> None:
        super().send(to, value, skip)
        self._post_to_all(to, value, skip)

    def _send_to_reader(self, to: Action, value: FlatTree, skip: Route | None) -> None:
        """Send a result to the caller that uses it, and its end to the others."""
        layout = self._layout
        reader = layout.owner_of(0 if to.j == CALLER else layout.n - 1)
        if reader == layout.rank:
            super().send(to, value, skip)
        else:
            self._post(reader, to, value, skip)
        if skip is None and to == self.phase.last_result:
            self._send_result(to, FlatTree([]), _END)

    @override
    def receive_end(self) -> None:
        self.receive(self.phase.last_result, _END if self._at_last else None)

    def _post(self, rank: int, to: Action, value: FlatTree, skip: Route | None) -> None:
        mail = self._mail(to, value, skip)
        if self._gpus is None:
            self._links.post(rank, self._header_for(to), mail)
        else:
            mail = mail._replace(gpus=self._gpus_between(mail, self._gpus))
            self._ahead.post(rank, self._header_for(to), mail)

    def _post_to_all(self, to: Action, value: FlatTree, skip: Route | None) -> None:
        mail = self._mail(to, value, skip)
        self._links.post_to_all(self._header_for(to), mail, hold=self._holds)

    @contextmanager
    def holding(self) -> Iterator[None]:
        """A ``with`` block at whose end results are sent together: they are awaited no sooner."""
        self._holds = True
        yield
        self._holds = False
        self._links.flush()

    @override
    def _fetch(self, inbox: int, at: Action) -> None:
        try:
            self.check()
        except RankFailed as error:
            what = f"{error}, while {self._value_for(at)} was awaited"
            raise RankFailed(what) from None
        if inbox == self._caller:
            self._expects()  # raises if a worker of this process has failed
        self._take(inbox)

    def _value_for(self, at: Action) -> str:
        if at.j == CALLER:
            return f"the end of {at.kind.verb} of micro-batch {at.i} on stage 0"
        if at.j == self._layout.n:
            return f"the output of micro-batch {at.i}"
        return f"the input of {at.kind.verb} of micro-batch {at.i} on stage {at.j}"

    @override
    def check(self) -> None:
        if self._error is not None:
            raise type(self._error)(*self._error.args)  # several threads may raise it
        super().check()

    @override
    def settle(self) -> None:
        self._links.settle(self.check)
        failure = self._office.end()
        if failure is not None:
            raise self._error_of(failure)

    # For the office, on the threads that receive.

    def arrive(self, rank: int, header: Header, mail: Mail) -> None:
        if header.label != self._label:
            ranks, layout = self._office.ranks, self._layout
            them, us = (names_of([k], ranks, layout) for k in (rank, layout.rank))
            text = difference(header.label, self._label, them, us, self._pipelines)
            self._end_with(OutOfStep(text))
            return
        self.heard |= header.bits  # before the value: its receiver reads these
        if mail.ready is not None:
            self._ahead.record(rank, mail)
        route = self._layout.routes[mail.route] if isinstance(mail.route, int) else mail.route
        self.put(mail.to, route, *self._moved(mail))

    def fail(self, failure: Failure) -> None:
        self._end_with(self._error_of(failure))

    def abandon(self) -> None:
        self._ahead.abandon()

    def _error_of(self, failure: Failure) -> RankFailed | OutOfStep:
        return failure.error(self._office.ranks, self._layout)

    def _end_with(self, error: RankFailed | OutOfStep) -> None:
        self._error = error
        self.cancel()

    def _mail(self, to: Action, value: FlatTree, route: Route | None) -> Mail:
        number = route if route is None else self._numbers.get(route, route)
        on_device = [isinstance(x, Tensor) and x.device.type != "cpu" for x in value.leaves]
        return Mail(to, number, value, on_device)

    def _gpus_between(self, mail: Mail, gpus: GpuTable) -> GpuPair | None:
        """Return the GPUs between which all device tensors of a value go straight, or None."""
        leaves = zip(mail.value.leaves, mail.on_device, strict=True)
        tensors = [leaf for leaf, moves in leaves if moves]
        devices = {tensor.device for tensor in tensors}
        if len(devices) != 1 or not all(map(is_dense, tensors)):
            return None
        j = min(max(mail.to.j, 0), self._layout.n - 1)
        return gpus.pair(devices.pop(), self._layout.placement[j])

    def _moved(self, mail: Mail) -> Parcel:
        leaves = list(mail.value.leaves)
        places = [k for k, moves in enumerate(mail.on_device) if moves]
        if mail.ready is not None or not places:  # it came straight, or stays on the host
            return mail.value, mail.ready
        device = self._copies.device_at(mail.to.j)
        copies, ready = self._copies.send([leaves[k] for k in places], None, device)
        for k, leaf in zip(places, copies, strict=True):
            leaves[k] = leaf
        return FlatTree(leaves, mail.value.spec), ready

    def _header_for(self, to: Action) -> Header:
        """Return a header with the signals, with the last micro-batch those of this process too.

        Its values leave each process last, and lead to the result that all get. To compare the
        generators for each value would take as long as to send it. Between GPUs some values come
        without a message.
        """
        if to.i == self.phase.last_result.i or self._gpus is not None:
            self._signalled |= self._bits()
        bits = self.heard | self._signalled
        return self._header._replace(bits=bits) if bits else self._header


class ProcessGroupTransport(Transport):
    """Runs the workers of this process with ``runner``, and connects them with those of others."""

    def __init__(
        self,
        layout: Layout,
        runner: LocalTransport | InlineTransport,
        connection: Connection,
        pipeline: int,
    ) -> None:
        self._layout = layout
        self._runner = runner
        self._connection = connection
        self._office = connection.office
        self._number = connection.first + pipeline
        self._forms = Forms()
        self._inline: ProcessGroupTransport | None = None
        if isinstance(runner, LocalTransport):
            self._inline = ProcessGroupTransport(layout, runner.inline(), connection, pipeline)
            self._inline._forms = self._forms

    def start(self) -> None:
        self._office.open()

    @override
    def exclusive(self) -> AbstractContextManager[None]:
        return self._runner.exclusive()

    @override
    def open(
        self, phase: Schedule, label: Label | None = None, awaited: Collection[Action] | None = None
    ) -> ProcessGroupExchange:
        copies = self._runner.inline().copies()
        assert label is not None, "processes compare the labels of what they run"
        label = label._replace(pipeline=self._number)
        forms = self._forms.of(self._office.ledger.failed, label)
        return ProcessGroupExchange(
            self._layout, phase, label, awaited, copies, self._connection, forms
        )

    @override
    def run(self, exchange: Exchange, tasks: Sequence[Task], caller: Task | None = None) -> None:
        assert isinstance(exchange, ProcessGroupExchange)
        # A caller with a row awaits each result at once.
        with exchange.holding() if caller is None else NOTHING:
            self._runner.run(exchange, tasks, caller)

    @property
    @override
    def begun(self) -> int:
        return self._office.ledger.begun

    @property
    @override
    def serial(self) -> int:
        return self._office.ledger.serial

    @override
    def tell(self, error: BaseException) -> None:
        # Which end code that waits in a failed run, or whose output another process gets.
        if not isinstance(error, RunCancelled | OutputElsewhere):
            self._office.tell(error)

    @override
    def explain(self, cause_of: Callable[[BaseException], BaseException]) -> None:
        self._office.explain(cause_of)

    @override
    def failure(self, within: float) -> RankFailed | OutOfStep | None:
        failure = self._office.failure(within)
        return None if failure is None else failure.error(self._office.ranks, self._layout)

    @override
    def on_lost_wait(self, act: Callable[[], None]) -> None:
        self._office.on_lost_wait(act)

    @override
    def inline(self) -> ProcessGroupTransport:
        return self._inline or self

    @override
    def close(self) -> None:
        self._connection.close()
        self._runner.close()
