"""Offices of many processes on threads of this one, over a network that the test plays."""

import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

from lightning_gpipe.core.transport.process_group.ledger import Failure
from lightning_gpipe.core.transport.process_group.office import Office
from lightning_gpipe.core.transport.process_group.wire.message import Header, Mail, MessageCode
from lightning_gpipe.core.transport.process_group.wire.tcp_connection import ConnectionBroken

_CLOSED = None  # what the last receive gets


class Network:
    """Connections between all processes, of which some may be killed or stopped.

    Attributes:
        messages: How many messages each process has sent, by their code and their receiver.
    """

    def __init__(self) -> None:
        self.queues: dict[tuple[int, int], SimpleQueue[bytes | None]] = {}
        self.messages: dict[int, Counter[tuple[MessageCode, int]]] = defaultdict(Counter)
        self.closed: set[int] = set()
        self.stopped: set[int] = set()
        self._lock = threading.Lock()

    def queue(self, source: int, to: int) -> SimpleQueue[bytes | None]:
        with self._lock:
            if (source, to) not in self.queues:
                self.queues[source, to] = SimpleQueue()
                if {source, to} & self.closed:
                    self.queues[source, to].put(_CLOSED)
            return self.queues[source, to]

    def close(self, rank: int) -> None:
        """Close all connections of a process, as its death does."""
        with self._lock:
            self.closed.add(rank)
            for (source, to), queue in self.queues.items():
                if rank in (source, to):
                    queue.put(_CLOSED)


class PlayedSockets:
    """The connections of one process."""

    def __init__(self, network: Network, rank: int, size: int) -> None:
        self._network, self.rank, self.size = network, rank, size

    def connection(self, rank: int) -> "PlayedConnection":
        return PlayedConnection(self._network, self.rank, rank)

    def connect(self, rank: int) -> None: ...

    def abort(self) -> None:
        self._network.close(self.rank)


class PlayedConnection:
    """A connection of process ``own`` with another one."""

    waits = False

    def __init__(self, network: Network, own: int, rank: int) -> None:
        self._network, self._own, self._rank = network, own, rank
        self._came = network.queue(rank, own)
        self._rest = memoryview(b"")  # of the message that is read
        self.established = threading.Event()
        self.established.set()

    def send(self, small: Sequence[memoryview], large: Sequence[memoryview] = ()) -> None:
        network, message = self._network, b"".join([*small, *large])
        if {self._rank, self._own} & network.closed:
            raise ConnectionBroken("closed")
        if not {self._rank, self._own} & network.stopped:
            code = MessageCode(Header.decode(memoryview(message)).code)
            network.messages[self._own][code, self._rank] += 1
            network.queue(self._own, self._rank).put(message)

    def read(self, room: memoryview) -> None:
        if not self._rest:
            message = self._came.get()
            if message is _CLOSED:
                self._came.put(_CLOSED)
                raise ConnectionBroken("closed")
            self._rest = memoryview(message)
        room[:], self._rest = self._rest[: len(room)], self._rest[len(room) :]

    def close(self, why: str) -> None: ...


class Recorder:
    """An exchange that keeps what comes."""

    purpose = "a forward of a mini-batch"

    def __init__(self) -> None:
        self.arrived: list[int] = []
        self.failure: Failure | None = None
        self._changed = threading.Condition()

    def arrive(self, rank: int, header: Header, mail: Mail) -> None:
        with self._changed:
            self.arrived.append(rank)
            self._changed.notify_all()

    def fail(self, failure: Failure) -> None:
        with self._changed:
            self.failure = failure
            self._changed.notify_all()

    def abandon(self) -> None:
        pass

    def await_arrivals(self, number: int, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: len(self.arrived) >= number, seconds)

    def await_failure(self, seconds: float) -> Failure | None:
        with self._changed:
            self._changed.wait_for(lambda: self.failure is not None, seconds)
            return self.failure


@contextmanager
def offices(size: int, lost_after: timedelta) -> Iterator[tuple[Network, list[Office]]]:
    """A network and the offices of all processes, which end at the end."""
    network = Network()
    sockets: list[Any] = [PlayedSockets(network, rank, size) for rank in range(size)]
    found = [Office(each, range(size), lost_after) for each in sockets]
    try:
        yield network, found
    finally:
        for rank in range(size):
            network.close(rank)
        for office in found:
            office.leave()
