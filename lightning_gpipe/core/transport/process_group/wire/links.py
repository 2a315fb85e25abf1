"""The connections to other processes, and the sends that have not completed.

A process is connected with its neighbours in a tree of all processes, and with those that it
exchanges values with: it asks them over the tree to connect too. What all must know is passed on by
each to all its connections once. So it gets around a process that is lost, and comes before the end
of the process that sends it.

A send returns at once, and reads its memory later: a phase ends when its sends have completed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from functools import partial

from torch import Tensor
from torch.distributed.distributed_c10d import ProcessGroupGloo

from lightning_gpipe.core.transport.process_group.abort import abort_gloo
from lightning_gpipe.core.transport.process_group.tree import Tree
from lightning_gpipe.core.transport.process_group.wire.channels import ChannelAborted, Channels
from lightning_gpipe.core.transport.process_group.wire.link import (
    ConnectionBroken,
    Link,
    PendingSend,
    Receiver,
)
from lightning_gpipe.core.transport.process_group.wire.message import ALL, Header, Mail, MessageCode
from lightning_gpipe.core.transport.process_group.wire.tensor_bytes import GpuPair
from lightning_gpipe.core.transport.threads import WorkerThread

_POLL = 0.2  # seconds
_JOIN = 1.0  # the same, for a thread whose waits have ended
_CONNECTING = 1.0  # the same, for another process that has been asked to connect
_SENT, _FREED = "gpipe-sent", "gpipe-freed"  # threads that wait for sends, and for those of copies
_MOST_COPIES = 256  # pending sends of copies, until the thread waits for them
_MOST_COPIED = 1 << 20  # the same in bytes: copies that live for long make the heap grow


class Links:
    """Sends to other processes and receives from them; ``near`` are connections to neighbours."""

    def __init__(self, group: ProcessGroupGloo, receiver: Receiver, channels: Channels) -> None:
        self._group = group
        self._receiver = receiver
        self._channels = channels
        self._rank = group.rank()
        self._tree = Tree(group.size())
        self._by_rank: dict[int, Link] = {}
        self._lock = threading.RLock()
        self._sends: list[PendingSend] = []  # of memory that must stay unchanged
        self._copies: list[PendingSend] = []
        self._waiters: dict[str, WorkerThread] = {}
        self._earlier: list[WorkerThread] = []  # that may wait still
        self.near = [self._link_to(rank) for rank in self._tree.neighbours(self._rank)]
        for link in self.near:  # the parent first, so that no circle waits
            link.connect()

    def __getitem__(self, rank: int) -> Link:
        return self._by_rank[rank]

    def __iter__(self) -> Iterator[Link]:
        return iter([*self._by_rank.values()])  # other threads may add some

    def start(self) -> None:
        for name in (_SENT, _FREED):
            if name not in self._waiters or not self._waiters[name].is_alive():
                self._waiters[name] = WorkerThread(name)
        for link in self:
            link.start()

    def accept(self, rank: int) -> Link:
        with self._lock:
            return self._by_rank.get(rank) or self._link_to(rank)

    def _link_to(self, rank: int) -> Link:
        link = self._by_rank[rank] = Link(self._group, rank, self._receiver, self._channels)
        return link

    def _reach(self, rank: int) -> Link:
        """Return the connection to a process, which is asked to connect if there is none."""
        with self._lock:
            if rank in self._by_rank:
                return self._by_rank[rank]
            link = self._link_to(rank)
        link.start()
        self.route(Header(MessageCode.CONNECT, 0, origin=self._rank, to=rank))
        return link

    def route(self, header: Header) -> None:
        hop = self._tree.next_hop(self._rank, header.to)
        self._send(hop, partial(self._by_rank[hop].tell, header))

    def post(self, rank: int, header: Header, mail: Mail, ahead: Sequence[bytes] = ()) -> None:
        header = header._replace(origin=self._rank, to=rank)
        link = self._reach(rank)
        if mail.gpus is None:
            self._send(rank, partial(link.post, header, *mail.encode()))
        else:
            self._send(rank, partial(link.post_straight, header, mail, ahead))

    def post_announced(self, rank: int, gpus: GpuPair, content: Tensor) -> None:
        def send() -> Sequence[PendingSend]:
            self._by_rank[rank].send_straight(gpus, [content])
            return ()

        self._send(rank, send)

    def post_to_all(self, header: Header, mail: Mail, *, hold: bool = False) -> None:
        """Send a value to all other processes, over the tree whose root this one is."""
        self.relay(header._replace(origin=self._rank, to=ALL), *mail.encode(), hold=hold)

    def relay(
        self, header: Header, body: bytes, tensors: Sequence[Tensor], *, hold: bool = False
    ) -> None:
        """Pass a value for all processes on to the children in the tree of its origin."""
        for rank in Tree(self._tree.size, header.origin).children(self._rank):
            self._send(rank, partial(self._reach(rank).post, header, body, tensors, hold=hold))

    def flush(self) -> None:
        for link in self:
            self._send(link.rank, link.flush)

    def tell(
        self, header: Header, text: str = "", *, but: Collection[int] = ()
    ) -> list[PendingSend]:
        """Send to all connected processes but some; return the sends to those that receive now."""
        sends: list[PendingSend] = []
        for link in self:
            if link.rank not in but:
                with suppress(RuntimeError), self._lock:  # the receiving thread notices a loss too
                    told = sends if link.reads else self._copies
                    told += link.tell(header, text)
        return sends

    def spread(self, header: Header, text: str, *, but: Collection[int]) -> None:
        """Send a header and a text to all connected processes but some, and wait for none."""
        sends = self.tell(header, text, but=but)
        with self._lock:
            self._copies += sends

    def settle(self, check: Callable[[], None]) -> None:
        """Wait until all sends of values but copies have completed, or ``check`` raises.

        For those between GPUs, the streams wait.
        """
        with self._lock:
            sends, self._sends = self._sends, []
            copies = self._copies if _are_many(self._copies) else []
            self._copies = [] if copies else self._copies
        if copies:  # nobody waits for these, also if a process does not read them
            self._event(copies, all, _FREED)
        if sends:
            completed = self._event(sends, all)
            while not completed.wait(_POLL):
                check()
        with suppress(ChannelAborted):  # the receiver knows of the loss
            self._channels.settle()

    def over(self, sends: Sequence[PendingSend]) -> threading.Event:
        """Return an event that is set once each of the sends has completed or failed."""
        return self._event(sends, lambda completed: True)

    def join(self, timeout: float, *, but: Collection[int] = ()) -> bool:
        """Wait until nothing more is received from any process but some; return True if so."""
        deadline = time.monotonic() + timeout
        awaited = [link for link in self if link.rank not in but]
        return all(link.join(max(0.0, deadline - time.monotonic())) for link in awaited)

    def abort(self) -> None:
        for link in self:
            if link.connected.wait(_CONNECTING):  # else its waits end with the others
                abort_gloo(self._group, link.rank)

    def end(self, timeout: float = _JOIN) -> None:
        """End the threads, or leave those that wait to a later call, after :meth:`abort`."""
        self._earlier += self._waiters.values()
        self._waiters = {}
        for waiter in self._earlier:
            waiter.end(timeout)
        self._earlier = [waiter for waiter in self._earlier if waiter.is_alive()]

    def _send(self, rank: int, send: Callable[[], Sequence[PendingSend]]) -> None:
        try:
            sends = send()
        except ConnectionBroken as error:  # before the thread that receives has noticed
            self._receiver.on_disconnect(rank, error)
            return
        with self._lock:
            self._sends += (send for send in sends if not send.copied)
            self._copies += (send for send in sends if send.copied)

    def _event(
        self,
        sends: Sequence[PendingSend],
        suffices: Callable[[list[bool]], bool],
        waiter: str = _SENT,
    ) -> threading.Event:
        """Return an event that is set after all sends, if their outcomes suffice."""
        event = threading.Event()

        def wait_for_all() -> None:
            if suffices(list(map(_completes, sends))):
                event.set()

        self._waiters[waiter].put(wait_for_all)
        return event


def _are_many(copies: Sequence[PendingSend]) -> bool:
    return len(copies) > _MOST_COPIES or sum(x.content.nbytes for x in copies) > _MOST_COPIED


def _completes(send: PendingSend) -> bool:
    try:
        send.wait()
    except RuntimeError:  # the receiving thread notices it too
        return False
    return True
