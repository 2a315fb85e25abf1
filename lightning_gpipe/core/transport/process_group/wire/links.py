"""The connections to all other processes, and the sends that have not completed.

A send returns at once, and reads its memory later. Copies in messages only have to live so long.
Other memory must stay unchanged until then, so a phase ends when its sends have completed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial

from torch.distributed.distributed_c10d import ProcessGroupGloo

from lightning_gpipe.core.transport.process_group.wire.link import (
    ConnectionBroken,
    Link,
    PendingSend,
)
from lightning_gpipe.core.transport.process_group.wire.message import Header, Mail
from lightning_gpipe.core.transport.threads import WorkerThread

_POLL = 0.2  # seconds
_JOIN = 1.0  # the same, for a thread whose waits have ended
_MOST_COPIES = 256  # pending sends of copies, until the thread waits for them


class Links:
    """Sends to all other processes, and receives from them.

    Args:
        group: The process group of all.
        deliver: Called with a rank, a header, and the value or the text that came after it; returns
            False if nothing more will come.
        on_message: Called with the rank when anything has come.
        on_lost: Called with the rank and the error when a connection has ended.
    """

    def __init__(
        self,
        group: ProcessGroupGloo,
        deliver: Callable[[int, Header, Mail | str], bool],
        on_message: Callable[[int], None],
        on_lost: Callable[[int, BaseException], None],
    ) -> None:
        self._by_rank = {
            rank: Link(group, rank, deliver, on_message, on_lost)
            for rank in range(group.size())
            if rank != group.rank()
        }
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._sends: list[PendingSend] = []  # of memory that must stay unchanged
        self._copies: list[PendingSend] = []
        self._waiter: WorkerThread | None = None
        self._earlier: list[WorkerThread] = []  # that may wait still

    def __getitem__(self, rank: int) -> Link:
        return self._by_rank[rank]

    def __iter__(self) -> Iterator[Link]:
        return iter(self._by_rank.values())

    def start(self) -> None:
        """Start the threads that receive, and the one that waits for sends, unless they run."""
        if self._waiter is None or not self._waiter.is_alive():
            self._waiter = WorkerThread("gpipe-sent")
        for link in self:
            link.start()

    def post(self, ranks: Iterable[int], header: Header, mail: Mail, *, hold: bool = False) -> None:
        """Send a value to other processes, see :meth:`Link.post`."""
        value = mail.encode()
        for rank in ranks:
            self._send(rank, partial(self._by_rank[rank].post, header, *value, hold=hold))

    def flush(self) -> None:
        """Send all values that were held back."""
        for link in self:
            self._send(link.rank, link.flush)

    def tell(
        self, header: Header, text: str = "", *, but: Collection[int] = ()
    ) -> list[PendingSend]:
        """Send a header and a text to all processes but some.

        Returns:
            The sends to those that receive: another one reads nothing until it starts again.
        """
        sends: list[PendingSend] = []
        for link in self:
            if link.rank not in but:
                with suppress(RuntimeError), self._lock:  # the receiving thread notices a loss too
                    told = self._copies if link.rests else sends
                    told += link.tell(header, text)
        return sends

    def settle(self, check: Callable[[], None]) -> None:
        """Wait until all sends of values but copies have completed, or ``check`` raises."""
        with self._lock:
            sends, self._sends = self._sends, []
            copies = self._copies if len(self._copies) > _MOST_COPIES else []
            self._copies = [] if copies else self._copies
        if copies:
            self._event(copies, all)  # nobody waits for it: the thread frees the copies
        if sends:
            completed = self._event(sends, all)
            while not completed.wait(_POLL):
                check()

    def over(self, sends: Sequence[PendingSend]) -> threading.Event:
        """Return an event that is set once each of the sends has completed or failed."""
        return self._event(sends, lambda completed: True)

    def join(self, timeout: float, *, but: Collection[int] = ()) -> bool:
        """Wait until nothing more is received from any process but some; return True if so."""
        deadline = time.monotonic() + timeout
        awaited = [link for link in self if link.rank not in but]
        return all(link.join(max(0.0, deadline - time.monotonic())) for link in awaited)

    def abort(self) -> None:
        """End all connections."""
        for link in self:
            link.abort()

    def end(self, timeout: float = _JOIN) -> None:
        """End the thread that waits for sends, or leave it to a later call, after :meth:`abort`."""
        self._earlier += [] if self._waiter is None else [self._waiter]
        self._waiter = None
        for waiter in self._earlier:
            waiter.end(timeout)
        self._earlier = [waiter for waiter in self._earlier if waiter.is_alive()]

    def _send(self, rank: int, send: Callable[[], Sequence[PendingSend]]) -> None:
        try:
            sends = send()
        except ConnectionBroken as error:  # before the thread that receives has noticed
            self._on_lost(rank, error)
            return
        with self._lock:
            self._sends += (send for send in sends if not send.copied)
            self._copies += (send for send in sends if send.copied)

    def _event(
        self, sends: Sequence[PendingSend], suffices: Callable[[list[bool]], bool]
    ) -> threading.Event:
        """Return an event that is set after all sends, if their outcomes suffice."""
        event = threading.Event()

        def wait_for_all() -> None:
            if suffices(list(map(_completes, sends))):
                event.set()

        assert self._waiter is not None, "it was started"
        self._waiter.put(wait_for_all)
        return event


def _completes(send: PendingSend) -> bool:
    """Wait for a send; return False if the connection is lost."""
    try:
        send.wait()
    except RuntimeError:  # the receiving thread notices it too
        return False
    return True
