"""The connections to other processes, and the sends that have not completed.

A process is connected with its neighbours in a tree of all processes, and with those that it
exchanges values with: it asks them over the tree to connect too. What all must know is passed on by
each to all its connections once. So it gets around a process that is lost, and comes before the end
of the process that sends it.

A send returns at once, and may read the memory of large tensors later: a phase ends when its sends
have ended.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import NoReturn

from torch import Tensor

from lightning_gpipe.core.transport.process_group.tree import Tree
from lightning_gpipe.core.transport.process_group.wire.channels import ChannelAborted, Channels
from lightning_gpipe.core.transport.process_group.wire.link import Link, Receiver
from lightning_gpipe.core.transport.process_group.wire.message import ALL, Header, Mail, MessageCode
from lightning_gpipe.core.transport.process_group.wire.sockets import Sockets
from lightning_gpipe.core.transport.process_group.wire.tcp_connection import ConnectionBroken, Send
from lightning_gpipe.core.transport.process_group.wire.tensor_bytes import GpuPair

_POLL = 0.2  # seconds
_CHECKS = 25  # for as many of these, until a failed send is an error of its own


class Links:
    """Sends to other processes and receives from them; ``near`` are connections to neighbours."""

    def __init__(self, sockets: Sockets, receiver: Receiver, channels: Channels) -> None:
        self._sockets = sockets
        self._receiver = receiver
        self._channels = channels
        self._rank = sockets.rank
        self._tree = Tree(sockets.size)
        self._by_rank: dict[int, Link] = {}
        self._lock = threading.RLock()
        self._sends: list[Send] = []  # of memory that must stay unchanged
        self.near = [self._link_to(rank) for rank in self._tree.neighbours(self._rank)]
        for link in self.near:  # the parent first, so that no circle waits
            link.connect()

    def __getitem__(self, rank: int) -> Link:
        return self._by_rank[rank]

    def __iter__(self) -> Iterator[Link]:
        return iter([*self._by_rank.values()])  # other threads may add some

    def start(self) -> None:
        for link in self:
            link.start()

    def accept(self, rank: int) -> Link:
        with self._lock:
            return self._by_rank.get(rank) or self._link_to(rank)

    def _link_to(self, rank: int) -> Link:
        link = self._by_rank[rank] = Link(self._sockets, rank, self._receiver, self._channels)
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
        self._send(rank, partial(self._by_rank[rank].send_straight, gpus, [content]))

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

    def tell(self, header: Header, text: str = "", *, but: Collection[int] = ()) -> list[Send]:
        """Send to all connected processes but some; return the sends to those that receive now."""
        sends: list[Send] = []
        for link in self:
            if link.rank not in but:
                with suppress(ConnectionBroken):  # the receiving thread notices a loss too
                    told = link.tell(header, text)
                    sends += told if link.reads else []
        return sends

    def settle(self, check: Callable[[], None]) -> None:
        """Wait until all sends of values have ended, or ``check`` raises.

        For those between GPUs, the streams wait.
        """
        with self._lock:
            sends, self._sends = self._sends, []
        for send in sends:
            while not send.wait(_POLL):
                check()
            if send.failure is not None:
                self._await_reason(send.failure, check)
        with suppress(ChannelAborted):  # the receiver knows of the loss
            self._channels.settle()

    def _await_reason(self, failure: str, check: Callable[[], None]) -> NoReturn:
        """Let ``check`` raise what is known of a failed send in a moment, or raise its error."""
        for _ in range(_CHECKS):
            check()
            time.sleep(_POLL)
        raise ConnectionBroken(failure)

    def join(self, timeout: float, *, but: Collection[int] = ()) -> bool:
        """Wait until nothing more is received from any process but some; return True if so."""
        deadline = time.monotonic() + timeout
        awaited = [link for link in self if link.rank not in but]
        return all(link.join(max(0.0, deadline - time.monotonic())) for link in awaited)

    def abort(self) -> None:
        """End all waits, and the use of the connections."""
        self._sockets.abort()

    def _send(self, rank: int, send: Callable[[], Sequence[Send] | None]) -> None:
        try:
            sends = send()
        except ConnectionBroken as error:  # before the thread that receives has noticed
            self._receiver.on_disconnect(rank, error)
            return
        if sends:
            with self._lock:
                self._sends += sends
