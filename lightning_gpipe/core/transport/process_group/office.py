"""The post office of a process: what goes to other processes, and what comes from them.

There is one for all pipelines over the same processes, since one that fails in one of them comes to
none of the others. It sends values and failures, and gives what comes to the exchange that runs.
What comes for one that this process has not begun waits for it. Each header says what the sender
does; an exchange of something else says so, in both.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from uuid import uuid4

from torch.distributed.distributed_c10d import ProcessGroupGloo

from lightning_gpipe.core.data import FlatTree
from lightning_gpipe.core.plan import Action
from lightning_gpipe.core.transport.process_group.ledger import Ledger, Verdict
from lightning_gpipe.core.transport.process_group.link import Broken, Link, Mail, Posted
from lightning_gpipe.core.transport.process_group.links import Links
from lightning_gpipe.core.transport.process_group.message import Code, Header, Way
from lightning_gpipe.core.transport.process_group.outbox import Outbox
from lightning_gpipe.core.transport.process_group.reception import Reception, Recipient
from lightning_gpipe.core.transport.process_group.told import note, noted, text_of
from lightning_gpipe.core.transport.process_group.waits import OtherWaits
from lightning_gpipe.core.transport.process_group.watch import Watch

_TOLD_WITHIN = 5.0  # seconds
_LINGER = 1.0  # the same if one is lost, so that others may read who before this one ends
START = 10  # times as long to be heard for the first time: one may still load a model


class Office:
    """Sends and receives for one process.

    Args:
        group: The process group of the owners of the pipelines, for tensors of the host.
        lost_after: After how long a process that is not heard is lost.
    """

    def __init__(self, group: ProcessGroupGloo, lost_after: timedelta) -> None:
        self._name = uuid4().hex  # in errors that were told
        self._lost_after = lost_after
        self._rank = group.rank()
        self._lock = threading.RLock()  # a garbage collection may close what is no longer used
        self._process = os.getpid()
        self._ledger = Ledger()
        self._reception = Reception()
        self._outbox = Outbox()
        self._links = Links(
            Link(group, rank, self._deliver, self._heard, self._disconnect)
            for rank in range(group.size())
            if rank != self._rank
        )
        links = list(self._links)
        self._watch = Watch(links, lost_after, START * lost_after, self._miss, self._beat)
        self._other_waits = OtherWaits()
        self._changed = threading.Condition(self._lock)  # in the ledger, by another process
        self._open = False  # for exchanges
        self._listens = False

    @property
    def begun(self) -> int:
        """How many exchanges were begun since a run failed; the same in all processes."""
        return self._ledger.begun

    @property
    def serial(self) -> int:
        """The number of the exchange that runs, or of the last one."""
        return self._ledger.serial

    @property
    def state(self) -> tuple[int, int, int]:
        """What is equal in processes that have done the same; see :class:`Ledger`."""
        return self._ledger.state

    @property
    def lost(self) -> Verdict | None:
        """Who is lost, once anybody is."""
        return self._ledger.lost

    def open(self) -> None:
        """Be ready for exchanges, until :meth:`pause` or :meth:`close`."""
        self._open = True
        self.listen()

    def listen(self) -> None:
        """Receive, and watch whether the others live, until :meth:`close`."""
        with self._lock:
            self._listens = True
            self._outbox.start()
            self._links.start()
            self._watch.start()

    def begin(self, recipient: Recipient) -> tuple[int, Verdict | None]:
        """Begin the next exchange.

        Returns:
            Its number; and why it cannot run, if another process has failed, closed, or is lost.
        """
        self.open()
        with self._lock:
            self._ledger.begun += 1
            serial = self._ledger.serial
            early = self._reception.begin(serial, recipient)
            failed = self._ledger.failure
        if failed is None:
            for each in early:
                recipient.arrive(*each)
        return serial, failed

    def end(self) -> Verdict | None:
        """End an exchange; returns how another process has failed in it, if one has."""
        with self._lock:
            self._reception.recipient = None
            return self._ledger.failure_in_it

    def post(self, rank: int, header: Header, to: Action, way: Way, value: FlatTree) -> None:
        """Send a value to another process; if it is lost, the exchange fails at its next wait."""
        self._send(rank, lambda link: link.post(header, to, way, value))

    def broadcast(
        self, header: Header, to: Action, way: Way, value: FlatTree, *, hold: bool = False
    ) -> None:
        """Send a value to all other processes; ``hold``: at :meth:`flush` at the latest."""
        for link in self._links:
            self._send(link.rank, lambda link: link.post(header, to, way, value, hold=hold))

    def flush(self) -> None:
        """Send what is held."""
        for link in self._links:
            self._send(link.rank, Link.flush)

    def _send(self, rank: int, send: Callable[[Link], list[Posted]]) -> None:
        try:
            posted = send(self._links[rank])
        except Broken as error:  # before the thread that receives has noticed
            self._disconnect(rank, error)
        else:
            self._outbox.add(posted)

    def settle(self, check: Callable[[], None]) -> None:
        """Wait until all that was sent has gone.

        Args:
            check: Raises if there is no use in waiting any more.
        """
        self._outbox.settle(check)

    def tell(self, error: BaseException) -> None:
        """Tell all others that this process has failed, unless they know.

        Their run ends with it, or their next one if none runs; the one after that works.
        """
        with self._lock:
            if noted(error, self._name, self._ledger.serial):
                return  # and nothing was begun since
            failing, known = self._ledger.fail(running=self._reception.recipient is not None)
            now = self._ledger.serial
            note(error, self._name, now)
            self._reception.fail(now)
        if not known and self._listens:
            header = Header(Code.FAILURE, failing)
            gone = self._outbox.gone(self._tell_all(header, f"failed: {text_of(error)}"))
            gone.wait(_TOLD_WITHIN)

    def failure(self, within: float) -> Verdict | None:
        """How another process has failed since the last exchange, if one has.

        Args:
            within: How many seconds to wait until that is known.
        """
        with self._lock:
            self._changed.wait_for(lambda: self._ledger.failure_next, within)
            return self._ledger.failure_next

    def absence(self) -> Verdict | None:
        """Who cannot come any more, having ended, if anybody has."""
        with self._lock:
            return self._ledger.ended

    def when_in_vain(self, act: Callable[[], None]) -> None:
        """Call ``act``, on another thread, when it is in vain to wait for another process."""
        self._other_waits.add(act)

    def pause(self) -> None:
        """Begin no exchange until others have closed too; others still hear this process."""
        if self._open:
            self._outbox.over(self._tell_all(self._closing(Code.CLOSED)))

    def close(self) -> None:
        """End the threads; others end theirs when they close too, or go on."""
        if not self._listens or self._process != os.getpid():  # threads are not forked
            return
        self._watch.stop()
        with self._lock:
            header = self._closing(Code.END)
            self._listens = False
            self._ledger.end()
            lost = self._ledger.lost is not None
        within = _LINGER if lost else _TOLD_WITHIN
        self._outbox.over(self._tell_all(header)).wait(within)
        self._links.join(within, self._ledger.lost_ranks)
        if lost:
            self._cut()
        else:
            self._outbox.end()

    def leave(self) -> None:
        """End for good, with the last pipeline or the process, so that nothing waits any more."""
        if self._process != os.getpid():
            return
        error = getattr(sys, "last_value", None)  # that ends the process
        if error is not None:
            self.tell(error)
        self.close()
        self._cut()

    def _cut(self) -> None:
        """End all connections, and all threads that wait for them."""
        self._ledger.lose([], Verdict((self._rank,), "has ended its pipeline"))
        self._links.cut()
        self._links.join(_TOLD_WITHIN)
        self._outbox.end()
        self._other_waits.join()  # see Note [Threads end before the interpreter]

    def _closing(self, code: Code) -> Header:
        """What tells others that this process closes, or has before if no exchange may run."""
        with self._lock:
            follows = self._ledger.close() if self._open else True
            self._open = False
            return Header(code, self._ledger.serial, closed=self._ledger.closed, bits=follows)

    def _tell_all(self, header: Header, text: str = "") -> list[Posted]:
        return self._links.tell(header, text, self._ledger.lost_ranks)

    # For the links, on the threads that receive, and for the watch.

    def _heard(self, rank: int) -> None:
        self._watch.heard(rank)

    def _deliver(self, rank: int, header: Header, content: Mail | str) -> bool:
        """Take what came from a process; returns whether more will come."""
        if isinstance(content, Mail):
            with self._lock:
                recipient = self._reception.take(self._ledger.serial, rank, header, content)
            if recipient is not None:
                recipient.arrive(rank, header, content)
        elif header.code == Code.LOST:
            ranks, how = json.loads(content)
            self._lose([], Verdict(tuple(ranks), how))
        elif header.code == Code.FAILURE:
            self._fail_with(header, Verdict((rank,), content))
        elif header.code == Code.CLOSED:
            self._closed_by(rank, header)
        else:
            return self._ended_by(rank, header)
        return True

    def _fail_with(self, header: Header, verdict: Verdict) -> None:
        with self._lock:
            self._ledger.hear(header.serial, verdict)
            self._changed.notify_all()
            found = self._ledger.failure_in_it
            recipient = self._reception.recipient
        if recipient is not None and found is not None:
            recipient.fail(found)

    def _closed_by(self, rank: int, header: Header) -> None:
        if header.bits:  # it was not the first, and who was is heard too
            return
        with self._lock:
            self._ledger.hear_closed(rank, header.closed, header.serial)
            recipient, failed = self._reception.recipient, self._ledger.failure
        if recipient is not None and failed is not None:
            recipient.fail(failed)

    def _ended_by(self, rank: int, header: Header) -> bool:
        """Hear that a process ends, or has heard that this one does; whether more will come."""
        with self._lock:
            more = self._listens  # though this process had ended, it has begun again since
            if header.code == Code.END:
                self._watch.excuse(rank)
                if not self._ledger.hear_end(rank) and more:
                    self._outbox.over(self._links[rank].tell(Header(Code.ANSWER, 0)))
                    more = False
            if not more:
                self._links[rank].rest()
        if header.code == Code.END:
            self._closed_by(rank, header)
        return more

    def _disconnect(self, rank: int, error: BaseException) -> None:
        self._lose([rank], Verdict((rank,), f"is lost: {error}"))

    def _miss(self, ranks: list[int]) -> None:
        seconds = self._lost_after.total_seconds()
        are = "is" if len(ranks) == 1 else "are"
        self._lose(ranks, Verdict(tuple(ranks), f"{are} lost: nothing was heard for {seconds:g} s"))

    def _lose(self, ranks: Sequence[int], verdict: Verdict) -> None:
        """Fail for good.

        Args:
            ranks: Those that cannot be reached any more; none if another process said so.
            verdict: Who is lost.
        """
        with self._lock:
            first = self._ledger.lose(ranks, verdict)
            self._changed.notify_all()
            recipient = self._reception.recipient
        if not first:
            return
        if ranks:  # first of all, for the others see next that this one ends
            how = f"{verdict.how}, as rank {self._rank} noticed"
            self._tell_all(Header(Code.LOST, 0), json.dumps([verdict.ranks, how]))
        if recipient is not None:
            recipient.fail(verdict)
        self._other_waits.end()

    def _beat(self) -> None:
        with self._lock:
            unheeded = self._reception.recipient is None and self._ledger.failure_next is not None
        self._other_waits.beat(self._watch.limit, unheeded=unheeded)
