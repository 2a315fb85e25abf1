"""Offices of many processes on threads of this one, over a network that the test plays."""

import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any
from unittest.mock import patch

from torch import Tensor

from lightning_gpipe.core.transport.process_group.ledger import Failure
from lightning_gpipe.core.transport.process_group.office import Office
from lightning_gpipe.core.transport.process_group.wire import envelope, link
from lightning_gpipe.core.transport.process_group.wire.message import Header, Mail, MessageCode

_CLOSED = None  # what the last receive gets


class Network:
    """Connections between all processes, of which some may be killed or stopped.

    Attributes:
        messages: How many messages each process has sent, by their code and their receiver.
    """

    def __init__(self) -> None:
        self.queues: dict[tuple[int, int, int], SimpleQueue[Tensor | None]] = {}
        self.messages: dict[int, Counter[tuple[MessageCode, int]]] = defaultdict(Counter)
        self.closed: set[int] = set()
        self.stopped: set[int] = set()
        self._lock = threading.Lock()

    def queue(self, source: int, to: int, tag: int) -> SimpleQueue[Tensor | None]:
        with self._lock:
            if (source, to, tag) not in self.queues:
                self.queues[source, to, tag] = SimpleQueue()
                if {source, to} & self.closed:
                    self.queues[source, to, tag].put(_CLOSED)
            return self.queues[source, to, tag]

    def close(self, rank: int) -> None:
        """Close all connections of a process, as its death does."""
        with self._lock:
            self.closed.add(rank)
            for (source, to, _), queue in self.queues.items():
                if rank in (source, to):
                    queue.put(_CLOSED)


class PlayedGroup:
    """The process group of one process."""

    def __init__(self, network: Network, rank: int, size: int) -> None:
        self._network, self._rank, self._size = network, rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> "Sent":
        if {rank, self._rank} & self._network.closed:
            raise RuntimeError("closed")
        if not {rank, self._rank} & self._network.stopped:
            code = MessageCode(int.from_bytes(tensors[0][:8].numpy().tobytes(), "little"))
            self._network.messages[self._rank][code, rank] += 1
            self._network.queue(self._rank, rank, tag).put(tensors[0].clone())
        return Sent()

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> "Receive":
        return Receive(self, self._network.queue(rank, self._rank, tag), tensors[0])

    def time_out(self) -> None:
        self._network.close(self._rank)


class Sent:
    def wait(self, timeout: timedelta) -> None:
        pass


class Receive:
    """A receive; if it times out, all of its process end, as over Gloo."""

    def __init__(self, group: PlayedGroup, queue: SimpleQueue[Tensor | None], room: Tensor) -> None:
        self._group, self._queue, self._room = group, queue, room

    def wait(self, timeout: timedelta) -> None:
        try:
            content = self._queue.get(timeout=min(timeout.total_seconds(), 1e6))
        except Empty:
            self._group.time_out()
            raise RuntimeError("timed out") from None
        if content is _CLOSED:
            self._queue.put(_CLOSED)
            raise RuntimeError("closed")
        self._room[: len(content)] = content


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
    with patch.object(link, "FRAME", 1 << 14), patch.object(envelope, "FRAME", 1 << 14):
        groups: list[Any] = [PlayedGroup(network, rank, size) for rank in range(size)]
        found = [Office(group, range(size), lost_after) for group in groups]
        try:
            yield network, found
        finally:
            for rank in range(size):
                network.close(rank)
            for office in found:
                office.leave()
