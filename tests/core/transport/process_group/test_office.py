"""What an office tells the others, over connections that the test plays."""

import json
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from types import FrameType
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from lightning_gpipe.core.data import LEAF_SPEC, FlatTree
from lightning_gpipe.core.schedules import Action, Kind
from lightning_gpipe.core.transport.process_group.ledger import Failure
from lightning_gpipe.core.transport.process_group.office import Office
from lightning_gpipe.core.transport.process_group.wire.channels import Channels
from lightning_gpipe.core.transport.process_group.wire.envelope import LARGE, Envelope, seal
from lightning_gpipe.core.transport.process_group.wire.link import Link
from lightning_gpipe.core.transport.process_group.wire.links import Links
from lightning_gpipe.core.transport.process_group.wire.message import (
    HEADER_SIZE,
    Header,
    Mail,
    MessageCode,
)
from lightning_gpipe.core.transport.process_group.wire.tcp_connection import ConnectionBroken, Send
from tests.support.faults import OwnError
from tests.support.played_network import Recorder, offices
from tests.support.waiting import NEVER, PATIENCE, awaited


class PlayedConnection:
    """A connection with a process that says what it is given to say, and then nothing.

    Args:
        sent: Where what is sent to it goes, with its rank.
        gone: When it has closed the connection.
        reads: Whether it reads what is sent.
        says: Its messages.
    """

    waits = False

    def __init__(
        self,
        sent: SimpleQueue[tuple[int, bytes]],
        rank: int,
        gone: threading.Event,
        *,
        reads: bool = True,
        says: bytes = b"",
    ) -> None:
        self._sent, self._rank = sent, rank
        self._gone, self._reads, self._says = gone, reads, memoryview(says)
        self.established = threading.Event()
        self.established.set()
        self.heard = threading.Event()  # once all that it says has been read

    def send(self, small: Sequence[memoryview], large: Sequence[memoryview] = ()) -> Send | None:
        self._sent.put((self._rank, b"".join([*small, *large])))
        return None if self._reads else Send(large)

    def read(self, room: memoryview) -> None:
        if not self._says:
            self.heard.set()
            self._gone.wait(NEVER)
            raise ConnectionBroken("closed")
        room[:], self._says = self._says[: len(room)], self._says[len(room) :]

    def close(self, why: str) -> None: ...


class PlayedSockets:
    """The connections of the first of some processes, of which the second one is gone.

    Or it is stopped: it reads nothing, and says nothing after what it ``says``.
    """

    rank = 0

    def __init__(self, *, stopped: bool = False, says: bytes = b"", size: int = 3) -> None:
        self.size = size
        self.sent: SimpleQueue[tuple[int, bytes]] = SimpleQueue()
        self.ended, self.aborted, gone = (threading.Event() for _ in range(3))
        gone.set()
        second = self.ended if stopped else gone
        played = partial(PlayedConnection, self.sent)
        self.connections = [
            played(1, second, reads=not stopped, says=says),
            *(played(rank, self.ended) for rank in range(2, size)),
        ]

    def connection(self, rank: int) -> PlayedConnection:
        return self.connections[rank - 1]

    def connect(self, rank: int) -> None: ...

    def abort(self) -> None:
        self.aborted.set()

    def told(self, code: MessageCode) -> tuple[int, str]:
        """Whom the office has told something next, and the text."""
        while True:
            rank, message = self.sent.get(timeout=PATIENCE)
            if Header.decode(memoryview(message)).code == code:
                return rank, message[HEADER_SIZE:].decode()


NOBODY: Any = Mock()  # takes what comes


def test_who_noticed_a_loss_is_named_by_its_global_rank() -> None:
    """Once it was named by its rank in the pipeline, which differs in a second replica."""
    sockets: Any = PlayedSockets()
    office = Office(sockets, (4, 5, 6), timedelta(seconds=PATIENCE))
    office.listen()

    rank, text = sockets.told(MessageCode.LOST)
    assert (rank, json.loads(text)) == (2, [[1], "is lost: closed, as rank 4 noticed"])

    sockets.ended.set()
    office.close()


def test_process_that_others_know_as_lost_is_neither_told_nor_awaited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once each pipeline of a process waited for a stopped one until it had noticed it itself."""
    monkeypatch.setattr("lightning_gpipe.core.transport.process_group.office.TELL_TIMEOUT", NEVER)
    sockets: Any = PlayedSockets(stopped=True)
    office = Office(sockets, (4, 5, 6), timedelta(seconds=NEVER))
    office.listen()
    lost: list[tuple[list[int], str]] = []
    office.on_lost = lambda ranks, how: lost.append((list(ranks), how))
    telling = threading.Thread(target=office.tell, args=(OwnError("burnt"),))
    telling.start()
    assert [sockets.told(MessageCode.FAILURE)[0] for _ in range(2)] == [1, 2]

    office.hear_of_loss([5, 9], "is lost: it says nothing")
    telling.join(PATIENCE)
    closing = threading.Thread(target=office.close)
    closing.start()

    assert sockets.told(MessageCode.END)[0] == 2
    sockets.ended.set()  # the others end too
    closing.join(PATIENCE)
    assert not telling.is_alive()
    assert not closing.is_alive()
    assert lost[0] == ([5], "is lost: it says nothing")


def test_process_that_leaves_waits_for_those_that_read_slowly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once it ended the connections after five seconds, and was lost to them."""
    place = "lightning_gpipe.core.transport.process_group"
    monkeypatch.setattr(f"{place}.office.TELL_TIMEOUT", 0.05)
    sockets: Any = PlayedSockets(stopped=True)
    office = Office(sockets, (4, 5, 6), timedelta(seconds=PATIENCE))
    office.listen()
    threading.Thread(target=office.leave).start()

    assert not sockets.aborted.wait(0.5)

    sockets.ended.set()
    assert sockets.aborted.wait(PATIENCE)


def said(code: MessageCode, text: str = "") -> bytes:
    """A message of the second process."""
    return b"".join(seal(Header(code, 1, times=1, origin=1), text.encode()))


BEAT = said(MessageCode.BEAT, json.dumps([{}, []]))


def test_process_that_has_closed_after_its_end_is_not_lost() -> None:
    """Once it was, where its end was read late: the answer came to nobody."""
    sockets: Any = PlayedSockets(says=said(MessageCode.END))
    office = Office(sockets, (4, 5, 6), timedelta(seconds=NEVER))
    lost: list[Any] = []
    office.on_lost = lambda *loss: lost.append(loss)
    office.listen()
    assert awaited(lambda: office.absence() is not None, True)

    sockets.ended.set()  # the third ends too
    office.close()

    assert [5] not in [ranks for ranks, _ in lost]


def test_process_that_has_left_is_not_lost_to_one_that_begins_another_run() -> None:
    """Once the user's own collectives were ended, where fits had failed in both processes."""
    with offices(2, timedelta(seconds=NEVER)) as (_, (here, there)):
        lost: list[Any] = []
        here.on_lost = lambda *loss: lost.append(loss)
        for office in (here, there):
            office.listen()
        there.leave()
        run = Recorder()

        _, failure = here.begin(run)

        failure = failure or run.await_failure(PATIENCE)
        assert failure == Failure((1,), "has ended")
        assert not lost

        here.hear_of_loss([], "wait for one another")  # a failure of processes that have not ended

        assert lost == [([], "wait for one another")]


def test_process_that_fails_and_leaves_says_why_to_one_that_begins_later() -> None:
    """Once that one heard that it had ended, but not why."""
    with offices(2, timedelta(seconds=NEVER)) as (_, (here, there)):
        for office in (here, there):
            office.listen()
        there.begin(Recorder())
        there.tell(OwnError("burnt"))
        there.leave()
        run = Recorder()

        _, failure = here.begin(run)

        assert awaited(lambda: here.ledger.lost is not None, True)
        assert failure == here.end() == Failure((1,), "failed: OwnError: burnt")
        assert run.failure is None
        here.tell(OwnError("as another has failed"))
        assert here.begin(run)[1] == Failure((1,), "closed the pipeline")


def test_process_that_closed_is_not_just_ended_to_one_that_heard_of_it_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once it was, while the first to say so was passed on: the second one was no news."""
    sockets: Any = PlayedSockets(stopped=True)
    office = Office(sockets, (4, 5, 6), timedelta(seconds=NEVER))
    office.listen()
    for run in (Recorder(), Recorder()):
        office.begin(run)
    closed, end = (
        Header(code, 1, times=1, origin=1) for code in (MessageCode.CLOSED, MessageCode.END)
    )
    passing_on, goes_on = threading.Event(), threading.Event()

    def tell(*_: Any, **__: Any) -> list[Send]:
        passing_on.set()
        goes_on.wait(PATIENCE)
        return []

    def hear_of_the_close_and_the_end() -> None:
        office.deliver(1, closed, "")
        office.deliver(1, end, "")
        office.on_disconnect(1, ConnectionBroken("closed"))

    with monkeypatch.context() as patch:
        patch.setattr(office.links, "tell", tell)
        first = threading.Thread(target=office.deliver, args=(2, closed, ""))
        second = threading.Thread(target=hear_of_the_close_and_the_end)
        first.start()
        assert passing_on.wait(PATIENCE)
        second.start()
        second.join(0.2)  # as far as it comes
        goes_on.set()
        for thread in (first, second):
            thread.join(PATIENCE)

    assert run.await_failure(PATIENCE) == Failure((1,), "closed the pipeline")
    sockets.ended.set()
    office.close()


def test_pipeline_that_is_freed_on_a_thread_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it did not wait for this thread, so the other processes took its own for lost."""
    place = "lightning_gpipe.core.transport.process_group"
    monkeypatch.setattr(f"{place}.office.TELL_TIMEOUT", 0.05)
    listening, freed = threading.Event(), list[str]()
    sockets: Any = PlayedSockets(stopped=True, says=BEAT, size=2)
    office = Office(sockets, (4, 5), timedelta(seconds=NEVER))

    def collect_garbage(rank: int) -> None:
        listening.wait(PATIENCE)
        if not freed:
            freed.append(threading.current_thread().name)
            office.leave()

    monkeypatch.setattr(office, "on_message", collect_garbage)
    office.listen()
    listening.set()

    assert not sockets.aborted.wait(0.5)

    assert freed == ["gpipe-from-rank-1"]
    sockets.ended.set()  # the other process ends too
    assert sockets.aborted.wait(PATIENCE)


def test_loss_that_another_connection_tells_of_a_process_that_is_heard() -> None:
    """Once a Trainer of an earlier fit, which one process had freed, ended the present one."""
    sockets: Any = PlayedSockets(stopped=True, says=BEAT)
    office = Office(sockets, (4, 5, 6), timedelta(seconds=NEVER))
    office.listen()
    assert sockets.connection(1).heard.wait(PATIENCE)

    office.hear_of_loss([5, 6], "is lost: nothing was heard")

    failure = office.failure(0.0)
    assert failure is not None and failure.ranks == (2,)
    sockets.ended.set()
    office.close()


def test_process_that_has_ended_is_told_but_not_awaited() -> None:
    """Once one that ended last waited for five seconds: the others read nothing any more."""
    sockets: Any = PlayedSockets(stopped=True)
    links = Links(sockets, NOBODY, Channels(None, 0))
    links.start()
    links[1].rest()

    told = links.tell(Header(MessageCode.CLOSED, 0))

    assert told == []
    assert [sockets.told(MessageCode.CLOSED)[0] for _ in range(2)] == [1, 2]
    sockets.ended.set()


def test_heartbeat_of_hours_to_a_process_that_has_ended() -> None:
    """Once it waited for the first of a thousand beats, so the others took it for lost."""
    sockets: Any = PlayedSockets(stopped=True)
    links = Links(sockets, NOBODY, Channels(None, 0))
    links[1].beat("read one day")
    sockets.connection(1).waits = True

    links[1].beat("too many")

    assert sockets.told(MessageCode.BEAT) == (1, "read one day")
    assert sockets.sent.empty()


def test_copies_that_a_process_does_not_read_hold_nobody_up() -> None:
    sockets: Any = PlayedSockets(stopped=True)
    links = Links(sockets, NOBODY, Channels(None, 0))
    links.start()
    value = FlatTree([torch.ones(8)], LEAF_SPEC)
    links.post(1, Header(MessageCode.VALUES, 1), Mail(Action(Kind.FORWARD, 0, 1), None, value))

    links.settle(partial(pytest.fail, "it waits"))

    sockets.ended.set()


def test_large_tensor_is_awaited_until_a_loss_is_known() -> None:
    """It must not change before it is sent; where it cannot be sent, another error says why."""
    sockets: Any = PlayedSockets(stopped=True)
    links = Links(sockets, NOBODY, Channels(None, 0))
    links.start()
    pending = Send([])
    sockets.connection(1).send = lambda small, large: pending
    value = FlatTree([torch.ones(LARGE)], LEAF_SPEC)
    links.post(1, Header(MessageCode.VALUES, 1), Mail(Action(Kind.FORWARD, 0, 1), None, value))
    checks = list[bool]()

    def check() -> None:
        checks.append(pending.failure is None)
        if checks[-1]:
            pending.end("closed")
        if len(checks) == 2:
            raise OwnError("lost")

    with pytest.raises(OwnError, match="lost"):
        links.settle(check)

    assert checks == [True, False]
    sockets.ended.set()


def test_large_tensor_that_fails_for_no_known_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be waited for without an end."""
    monkeypatch.setattr(f"{Links.__module__}._POLL", 0.01)
    sockets: Any = PlayedSockets(stopped=True)
    links = Links(sockets, NOBODY, Channels(None, 0))
    pending = Send([])
    pending.end("connection closed: no route")
    links._sends = [pending]

    with pytest.raises(ConnectionBroken, match="no route"):
        links.settle(lambda: None)


def held(link: Link, header: Header, body: bytes) -> None:
    link.post(header, body, [torch.ones(3, dtype=torch.uint8)], hold=True)


@pytest.mark.parametrize("change", [{"to": 2}, {"origin": 1}, {"serial": 2}], ids=str)
def test_values_for_others_go_apart(change: Any) -> None:
    """Once they went by the header of the last of them, so its tree was that of all."""
    sockets: Any = PlayedSockets(stopped=True)
    link = Links(sockets, NOBODY, Channels(None, 0))[1]
    header = Header(MessageCode.VALUES, 1)

    for each, body in ((header, b"first"), (header, b"second"), (header._replace(**change), b"3.")):
        held(link, each, body)
    link.flush()

    (_, one), (_, other) = sockets.sent.get(), sockets.sent.get()
    assert b"first" in one and b"second" in one and b"3." in other
    for each, message in ((header, one), (header._replace(**change), other)):
        assert Header.decode(memoryview(message))._replace(size=0) == each


@pytest.mark.parametrize("moment", range(1, 12))
def test_interrupt_while_a_value_is_held_back(moment: int) -> None:
    """Once a part of it went with the values of the next run."""
    sockets: Any = PlayedSockets(stopped=True)
    link = Links(sockets, NOBODY, Channels(None, 0))[1]
    codes, lines = {Link.post.__code__, Envelope.add.__code__}, 0

    def interrupt(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines
        lines += frame.f_code in codes and event == "line"
        if lines == moment:
            sys.settrace(None)
            raise KeyboardInterrupt
        return interrupt

    before = sys.gettrace()
    sys.settrace(interrupt)
    with suppress(KeyboardInterrupt):
        held(link, Header(MessageCode.VALUES, 1), b"old")
    sys.settrace(before)
    held(link, Header(MessageCode.VALUES, 2), b"new")
    link.flush()

    *_, (_, last) = [sockets.sent.get() for _ in range(sockets.sent.qsize())]
    assert b"new" in last and b"old" not in last
