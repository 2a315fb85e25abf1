"""The post office of a process: it sends failures to other processes, and delivers what they send.

There is one for all pipelines over the same processes. A value goes to the exchange that runs, or
waits for the one that this process has not begun. A failure ends the exchange that runs, or the
next one, and each process passes it on. Heartbeats go between neighbours in a tree, and carry the
operations of each subtree to the root, which finds waits that are in vain.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Protocol
from weakref import WeakMethod

from torch import Tensor
from torch.distributed.distributed_c10d import Store

from lightning_gpipe.core.transport.process_group.abort import UserCollectives
from lightning_gpipe.core.transport.process_group.gossip import Gossip
from lightning_gpipe.core.transport.process_group.heartbeat import Heartbeat
from lightning_gpipe.core.transport.process_group.ledger import AT_ONCE, Failure, Ledger, run_of
from lightning_gpipe.core.transport.process_group.requests import Requests
from lightning_gpipe.core.transport.process_group.tree import Tree
from lightning_gpipe.core.transport.process_group.whereabouts import OWN, Waits, ranges_of
from lightning_gpipe.core.transport.process_group.wire.channels import Channels
from lightning_gpipe.core.transport.process_group.wire.links import Links
from lightning_gpipe.core.transport.process_group.wire.message import Header, Mail, MessageCode
from lightning_gpipe.core.transport.process_group.wire.sockets import Sockets

TELL_TIMEOUT = 5.0  # seconds
_LINGER = 1.0  # the same from a loss on, so that others may read of it before this process ends
_POLL = 0.05  # seconds
START = 10  # times as long until the first heartbeat: a process may still load a model


class Recipient(Protocol):
    """An exchange, which takes values from processes, and ends when one has failed."""

    purpose: str

    def arrive(self, rank: int, header: Header, mail: Mail) -> None: ...

    def fail(self, failure: Failure) -> None: ...

    def abandon(self) -> None: ...


class Office:
    """Sends and receives for one process; made in all of them at once.

    Args:
        sockets: The connections of the owners of the pipelines.
        ranks: Their global ranks.
        lost_after: How long a process may be silent until it is lost.
        store: The store where GPUs of two processes find one another; None if no two will.
    """

    def __init__(
        self,
        sockets: Sockets,
        ranks: Sequence[int],
        lost_after: timedelta,
        store: Store | None = None,
    ) -> None:
        self.ranks = ranks
        self._lost_after = lost_after
        self._rank = sockets.rank
        self._lock = threading.RLock()  # a garbage collection may close a pipeline
        # Held while news is passed on: its sender's end may follow a copy that another brings.
        self._hearing = threading.RLock()
        self._process = os.getpid()
        self.ledger = Ledger()
        tree = Tree(len(ranks))
        self._parent = tree.parent(self._rank)
        self.requests = Requests(tree, self._rank)
        self._gossip = Gossip()
        self._recipient: Recipient | None = None  # the exchange that runs
        self._early: dict[int, list[tuple[int, Header, Mail]]] = {}  # for later exchanges
        self._heartbeat = Heartbeat(
            tree.neighbours(self._rank), lost_after, START, self._miss, self._send_beats, self._beat
        )
        self._waits = Waits(ranks, tree, self._rank)
        self._runs = f"runs of {ranges_of(ranks)}"  # a group of operations, see Whereabouts
        self._user_collectives = UserCollectives()
        self._changed = threading.Condition(self._lock)  # in the ledger, by another process
        self._open = False  # for exchanges
        self._listens = False
        self._lost_at = math.inf  # when a loss became known
        self.on_lost: Callable[[Sequence[int], str], None] | None = None
        self._explain: WeakMethod[Callable[[BaseException], BaseException]] | None = None
        self._channels = Channels(store, self._rank)
        self.links = Links(sockets, self, self._channels)

    def open(self) -> None:
        """Be ready for exchanges, until :meth:`pause` or :meth:`close`."""
        self._open = True
        self.listen()

    def listen(self) -> None:
        """Receive, and send and expect heartbeats, until :meth:`close`."""
        with self._lock:
            self._listens = True
            self.links.start()
            self._heartbeat.start()

    def begin(self, recipient: Recipient) -> tuple[int, Failure | None]:
        """Begin the next exchange; return its number, and the reason if it cannot run."""
        self.open()
        with self._lock:
            self.ledger.begun += 1
            serial = self.ledger.serial
            self._recipient = recipient
            OWN.begin(self._runs, serial, self.ranks, recipient.purpose)
            arrivals = self._early.pop(serial, [])
            failure = self.ledger.failure
        if failure is None:
            for arrival in arrivals:
                recipient.arrive(*arrival)
        return serial, failure

    def end(self) -> Failure | None:
        """End an exchange; return how another process has failed in it, or None."""
        with self._lock:
            self._leave_exchange()
            return self.ledger.failure_at_end

    def tell(self, error: BaseException) -> None:
        """Tell all others that this process has failed: their present run ends, or the next."""
        recipient = self._recipient
        if recipient is not None:
            recipient.abandon()
        with self._lock:
            if self.ledger.was_sent(error):
                return
            failing, known = self.ledger.fail(running=self._recipient is not None)
            self.ledger.mark_sent(error)
            header = Header(MessageCode.FAILURE, failing, origin=self._rank)
            known = known or not self._is_news(header)
            serial = self.ledger.serial
            self._leave_exchange()
            self._early = {k: arrivals for k, arrivals in self._early.items() if k > serial}
        if not known and self._listens:
            failure = Failure.of(self._rank, self._cause_of(error))
            self._tell_and_wait(header, failure.encode())

    def explain(self, cause_of: Callable[[BaseException], BaseException]) -> None:
        # Weakly: its owner may hold the connection, which would then never end.
        self._explain = WeakMethod(cause_of)

    def _cause_of(self, error: BaseException) -> BaseException:
        explain = None if self._explain is None else self._explain()
        return error if explain is None else explain(error)

    def _leave_exchange(self) -> None:
        self._recipient = None
        OWN.end(self._runs)

    def failure(self, within: float) -> Failure | None:
        with self._lock:
            self._changed.wait_for(lambda: self.ledger.failure_next, within)
            return self.ledger.failure_next

    def absence(self) -> Failure | None:
        """Return the processes that have ended and cannot come any more, or None."""
        with self._lock:
            return self.ledger.ended

    def hear_of_loss(self, ranks: Sequence[int], how: str) -> None:
        """Record a loss of some global ranks, which another office of this process knows of.

        Those that this one hears are alive. If none is lost, some wait for one another: all end.
        """
        others = [k for k, rank in enumerate(self.ranks) if rank in ranks and k != self._rank]
        own = [k for k in others if not (self._listens and self._heartbeat.hears(k))]
        if own or not ranks:
            self._lose(own, Failure(tuple(own), how))

    def on_lost_wait(self, act: Callable[[], None]) -> None:
        self._user_collectives.add(act)

    def pause(self) -> None:
        """Begin no exchange until others have closed too; others still hear this process."""
        with self._lock:
            if not self._open:
                return
            self._open = False
            follows = self.ledger.close()  # another process, of which all hear
            closed = self.ledger.closed
            header = Header(MessageCode.CLOSED, self.ledger.serial, times=closed)
            header = header._replace(origin=self._rank)
            first = not follows and self._is_news(header)
        if first:
            self._spread(header)

    def close(self) -> None:
        """End the threads; others end theirs when they close too, or go on."""
        if not self._listens or self._process != os.getpid():  # threads are not forked
            return
        self._heartbeat.stop()
        self.pause()
        with self._lock:
            self._listens = False
            self.ledger.end()
            last = self.ledger.serial - (self._recipient is not None)
            header = Header(MessageCode.END, last, times=self.ledger.ends, origin=self._rank)
        deadline = time.monotonic() + TELL_TIMEOUT
        self._wait(lambda: self._channels.finish(_POLL), deadline)
        self._tell_and_wait(header)
        self._wait(lambda: self.links.join(_POLL, but=self.ledger.lost_ranks), deadline)
        if self.ledger.lost is not None:
            self._abort()

    def leave(self) -> None:
        """End for good, with the last pipeline or the process, so that nothing waits any more."""
        if self._process != os.getpid():
            return
        if threading.current_thread() is threading.main_thread():
            self._leave()
        else:  # garbage is collected on any thread, also on one that this waits for; no daemon
            threading.Thread(target=self._leave, name="gpipe-leave").start()

    def _leave(self) -> None:
        error = getattr(sys, "last_value", None)  # it ends the process
        if error is not None:
            self.tell(error)
        self.close()
        if not self.ledger.has_failed:  # another may read slowly what this process has sent last
            deadline = time.monotonic() + self._lost_after.total_seconds()
            self._wait(lambda: self.links.join(_POLL, but=self.ledger.lost_ranks), deadline)
        self._abort()

    def _abort(self) -> None:
        self.ledger.lose([], Failure((self._rank,), "has ended its pipeline"))
        self._channels.abort()
        self.links.abort()
        self.links.join(TELL_TIMEOUT)
        self._channels.join()
        self._user_collectives.join()  # see Note [Threads end before the interpreter]

    def _is_news(self, header: Header) -> bool:
        """Return True for a message that all must get, if they have no earlier one like it."""
        about = header.serial
        when: tuple[int, ...] = ()
        if header.code == MessageCode.FAILURE:
            about, when = run_of(header.serial), (header.serial, header.origin)
        elif header.code == MessageCode.CLOSED:
            about, when = header.times, (header.serial, header.origin)
        elif header.code == MessageCode.ENDED:
            about = header.times
        return self._gossip.is_news((header.code, about), *when)

    def _spread(self, header: Header, text: str = "", *, but: int = -1) -> None:
        self.links.tell(header, text, but={*self.ledger.lost_ranks, but})

    def _tell_and_wait(self, header: Header, text: str = "") -> None:
        deadline = time.monotonic() + TELL_TIMEOUT
        sends = self.links.tell(header, text, but=self.ledger.lost_ranks)
        self._wait(lambda: all(send.wait(_POLL) for send in sends), deadline)

    def _wait(self, is_over: Callable[[], bool], deadline: float) -> None:
        while not is_over() and time.monotonic() < min(deadline, self._lost_at + _LINGER):
            pass

    # For the links, on the threads that receive.

    def on_message(self, rank: int) -> None:
        self._heartbeat.reset(rank)

    def relay(self, header: Header, body: bytes, tensors: Sequence[Tensor]) -> None:
        self.links.relay(header, body, tensors)

    def deliver(self, rank: int, header: Header, content: Mail | str) -> bool:
        if isinstance(content, Mail):
            self._deliver_mail(header, content)
        elif header.code == MessageCode.BEAT:
            self._hear_beat(rank, content)
        elif header.code == MessageCode.LOST:
            failure = Failure.decode(content)
            self._lose(failure.ranks, failure, but=rank)
        elif header.code == MessageCode.CONNECT:
            self._connect(header)
        elif header.code in (MessageCode.END, MessageCode.ANSWER):
            return self._end_link(rank, header)
        else:
            self._hear_news(rank, header, content)
        return True

    def on_disconnect(self, rank: int, error: BaseException) -> None:
        with self._lock:
            end = self.ledger.end_of(rank)
        if end is None:
            self._notice_loss([rank], f"is lost: {error}")
        else:  # this process was still to begin a run, or another one
            self._lose([rank], Failure.ended([rank]), after=end)

    def _deliver_mail(self, header: Header, mail: Mail) -> None:
        arrival = header.origin, header, mail
        with self._lock:
            serial = self.ledger.serial
            if header.serial > serial:
                self._early.setdefault(header.serial, []).append(arrival)
            # Mail for an earlier exchange, which has failed, is dropped.
            recipient = self._recipient if header.serial == serial else None
        if recipient is not None:
            recipient.arrive(*arrival)

    def _connect(self, header: Header) -> None:
        if header.to != self._rank:
            self.links.route(header)
            return
        with self._lock:
            link = self.links.accept(header.origin)
            if self._listens:
                link.start()

    def _hear_news(self, rank: int, header: Header, text: str) -> None:
        with self._hearing:
            with self._lock:
                if not self._is_news(header):
                    return
            # Before this process acts on it: others hear of it before they see that this one ends.
            self._spread(header, text, but=rank)
            with self._lock:
                present = self._record(header, text)
                self._changed.notify_all()
                recipient = self._recipient
        if recipient is not None and present is not None:
            recipient.fail(present)

    def _record(self, header: Header, text: str) -> Failure | None:
        """Record the news; return the reason why the present exchange fails, if any."""
        if header.code == MessageCode.FAILURE:
            self.ledger.record_failure(header.serial, Failure.decode(text))
            return self.ledger.failure_at_end
        if header.code == MessageCode.CLOSED:
            self.ledger.record_close(header.origin, header.times, header.serial)
            return self.ledger.failure
        self.ledger.record_end(header.origin, header.times, header.serial)
        return None

    def _end_link(self, rank: int, header: Header) -> bool:
        """Record the end of a connected process, or its answer; return False if no more comes."""
        ended = header.code == MessageCode.END
        with self._lock:
            more = self._listens  # this process had ended, but has begun again since
            news = header._replace(code=MessageCode.ENDED)
            spreads = ended and more and self._is_news(news)
            if ended:
                self._heartbeat.excuse(rank)
                if not self.ledger.record_end(rank, header.times, header.serial) and more:
                    with suppress(RuntimeError):  # it has not waited for the answer
                        self.links[rank].tell(Header(MessageCode.ANSWER, 0))
                    more = False
            if not more:
                self.links[rank].rest()
        if spreads:
            self._spread(news, but=rank)
        return more

    # For the heartbeat, on its thread.

    def _miss(self, ranks: list[int]) -> None:
        seconds = self._lost_after.total_seconds()
        are = "is" if len(ranks) == 1 else "are"
        self._notice_loss(ranks, f"{are} lost: nothing was heard for {seconds:g} s")

    def _notice_loss(self, ranks: Sequence[int], how: str) -> None:
        noticed = f"{how}, as rank {self.ranks[self._rank]} noticed"
        self._lose(ranks, Failure(tuple(ranks), how), noticed)

    def _lose(
        self,
        ranks: Sequence[int],
        failure: Failure,
        others: str = "",
        *,
        but: int = -1,
        after: int = AT_ONCE,
    ) -> None:
        """Fail for good, and tell all but one, in the words ``others`` if there are any.

        Where a process has ended ``after`` an exchange, the others have heard of its end, and the
        user's code may wait for it.
        """
        lives = after != AT_ONCE
        with self._lock:
            first = self.ledger.lose(ranks, failure, after)
            if not lives:
                self._lost_at = min(self._lost_at, time.monotonic())
            self._changed.notify_all()
            recipient = self._recipient
            # An exchange that needs nothing more of it goes on, or fails for what it has told.
            spared = recipient is not None and self.ledger.failure_at_end is not failure
            present = self.ledger.failure or failure  # it may have closed before
        if not first or spared:
            return
        self._channels.abort()
        if not lives:  # before anything else: they see next that this process ends
            told = failure._replace(how=others or failure.how)
            self._spread(Header(MessageCode.LOST, 0), told.encode(), but=but)
        if recipient is not None:
            recipient.fail(present)
        if lives:
            return
        if self.on_lost is not None:
            self.on_lost([self.ranks[k] for k in ranks], failure.how)
        self._user_collectives.abort()

    def _send_beats(self) -> None:
        self._waits.observe(OWN.now())
        self._tell_neighbours()

    def _tell_neighbours(self) -> None:
        up = json.dumps([self.requests.to_parent(), self._waits.to_parent()])
        down = json.dumps([self.requests.to_children(), self._waits.to_children()])
        for link in self.links.near:
            link.beat(up if link.rank == self._parent else down)

    def _hear_beat(self, rank: int, text: str) -> None:
        requests, waits = json.loads(text)
        if rank == self._parent:
            self._waits.hear_parent(waits)
            news = self.requests.hear_parent(requests)
        else:
            self._waits.hear_child(rank, waits)
            news = self.requests.hear_child(rank, requests)
        if news and self._listens:  # someone waits for it
            self._tell_neighbours()

    def _beat(self) -> None:
        text = self._waits.in_vain()
        with self._lock:
            unnoticed = self._recipient is None and self.ledger.failure_next is not None
            failed = unnoticed or self.ledger.has_failed  # of which the waits come
        if text and not failed:
            self._lose([], Failure((), text))
        limit = self._heartbeat.limit
        self._user_collectives.beat(limit, unnoticed=unnoticed, in_vain=bool(text))
