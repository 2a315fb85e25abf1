"""The values of one phase, some of which cross to other processes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from typing_extensions import override

from lightning_gpipe.core.data import FlatTree
from lightning_gpipe.core.plan import CALLER, Action, Layout, Route, Schedule, sender
from lightning_gpipe.core.transport.copies import Copies, Parcel
from lightning_gpipe.core.transport.interface import Label, OutOfStep, RankFailed
from lightning_gpipe.core.transport.local import LocalExchange
from lightning_gpipe.core.transport.process_group.difference import difference
from lightning_gpipe.core.transport.process_group.ledger import Verdict, named
from lightning_gpipe.core.transport.process_group.link import Mail
from lightning_gpipe.core.transport.process_group.message import Code, Header, Way
from lightning_gpipe.core.transport.process_group.sharing import Connection


class ProcessGroupExchange(LocalExchange):
    """One inbox for each worker of this process, and one for its caller.

    The caller's code runs in each process, on the same values. So what it sends goes to the workers
    of its own process only, and what it gets goes to all callers.

    Args:
        layout: What runs where.
        phase: The phase.
        label: Which it is.
        awaited: For which results the caller waits; None for all.
        copies: Copies between the devices of this process.
        connection: To other processes.
    """

    def __init__(
        self,
        layout: Layout,
        phase: Schedule,
        label: Label,
        awaited: Collection[Action] | None,
        copies: Copies,
        connection: Connection,
    ) -> None:
        super().__init__(layout, phase, copies)
        self.heard = 0
        self._layout = layout
        self._awaited = awaited
        self._connection = connection
        self._office = connection.office
        self._failure: RankFailed | OutOfStep | None = None
        self._bits: Callable[[], int] = int
        self._holds = False
        self._label = label
        self._ways = {route: number for number, route in enumerate(layout.routes)}
        serial, failed = self._office.begin(self)
        if failed is not None:
            raise RankFailed(failed.text(connection.ranks, layout))
        self._header = Header(Code.VALUES, serial, label)

    @override
    def signal(self, bits: Callable[[], int]) -> None:
        self._bits = bits

    @override
    def send(self, to: Action, value: FlatTree, skip: Route | None = None) -> None:
        layout = self._layout
        if 0 <= to.j < layout.n:
            owner = layout.owner_of(to.j)
            if owner == layout.rank:
                super().send(to, value, skip)
            elif 0 <= sender(to, skip) < layout.n:
                self._office.post(owner, self._header_now(), to, self._way(skip), value)
        elif self._awaited is None or to in self._awaited:
            super().send(to, value, skip)
            header, way = self._header_now(), self._way(skip)
            self._office.broadcast(header, to, way, value, hold=self._holds)

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Let results go together when a ``with`` block ends: they are awaited no sooner."""
        self._holds = True
        yield
        self._holds = False
        self._office.flush()

    @override
    def _fetch(self, inbox: int, at: Action) -> None:
        try:
            self.check()
        except RankFailed as error:
            raise RankFailed(f"{error}, while {self._awaited_at(at)} was awaited") from None
        self._take(inbox)

    def _awaited_at(self, at: Action) -> str:
        """What is awaited in the place of ``at``."""
        if at.j == CALLER:
            return f"the end of {at.kind.verb} of micro-batch {at.i} on stage 0"
        if at.j == self._layout.n:
            return f"the output of micro-batch {at.i}"
        return f"the input of {at.kind.verb} of micro-batch {at.i} on stage {at.j}"

    @override
    def check(self) -> None:
        if self._failure is not None:
            raise type(self._failure)(*self._failure.args)  # several threads may raise it
        super().check()

    @override
    def settle(self) -> None:
        self._office.settle(self.check)
        failed = self._office.end()
        if failed is not None:
            raise RankFailed(failed.text(self._connection.ranks, self._layout))

    # For the office, on the threads that receive.

    def arrive(self, rank: int, header: Header, mail: Mail) -> None:
        """Take a value, and the bits that were signalled with it."""
        if header.label != self._label:
            pipelines, numbers = self._connection.pipelines, self._connection.ranks
            them, us = (named([k], numbers, self._layout) for k in (rank, self._layout.rank))
            text = difference(header.label, self._label, them, us, pipelines)
            self._fail_with(OutOfStep(text))
            return
        self.heard |= header.bits  # before the value: who has that knows of these
        route = self._layout.routes[mail.way] if isinstance(mail.way, int) else mail.way
        self.put(mail.to, route, *self._placed(mail))

    def fail(self, verdict: Verdict) -> None:
        """End, because another process has failed."""
        self._fail_with(RankFailed(verdict.text(self._connection.ranks, self._layout)))

    def _fail_with(self, error: RankFailed | OutOfStep) -> None:
        self._failure = error
        self.cancel()

    def _way(self, route: Route | None) -> Way:
        return route if route is None else self._ways.get(route, route)

    def _placed(self, mail: Mail) -> Parcel:
        """The value, with copies on the device of their stage of those tensors that go there."""
        leaves = list(mail.value.leaves)
        places = [k for k, moves in enumerate(mail.on_device) if moves]
        if not places:
            return mail.value, None
        device = self._copies.device_at(mail.to.j)
        moved, ready = self._copies.send([leaves[k] for k in places], None, device)
        for k, leaf in zip(places, moved, strict=True):
            leaves[k] = leaf
        return FlatTree(leaves, mail.value.spec), ready

    def _header_now(self) -> Header:
        return self._header._replace(bits=self.heard | self._bits())
