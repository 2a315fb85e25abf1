"""What an office tells the others, over connections that the test plays."""

import json
import threading
import weakref
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from lightning_gpipe.core.data import LEAF_SPEC, FlatTree
from lightning_gpipe.core.schedules import Action, Kind
from lightning_gpipe.core.transport.process_group.office import Office
from lightning_gpipe.core.transport.process_group.wire.channels import Channels
from lightning_gpipe.core.transport.process_group.wire.envelope import (
    FRAME,
    open_message,
    seal,
)
from lightning_gpipe.core.transport.process_group.wire.link import PendingSend
from lightning_gpipe.core.transport.process_group.wire.links import Links
from lightning_gpipe.core.transport.process_group.wire.message import Header, Mail, MessageCode
from tests.support.faults import OwnError
from tests.support.waiting import NEVER, PATIENCE, awaited


class Work:
    """A receive that ends with an error, once that may be."""

    def __init__(self, ended: threading.Event) -> None:
        self._ended = ended

    def wait(self, timeout: timedelta) -> None:
        self._ended.wait(timeout.total_seconds())
        raise RuntimeError("closed")


class Sent:
    """A send that completes once that may be."""

    def __init__(self, read: threading.Event) -> None:
        self._read = read

    def wait(self, timeout: timedelta) -> None:
        self._read.wait(timeout.total_seconds())


class PlayedGroup:
    """A group of three processes, of which this one is the first, and the second is gone.

    Or it is stopped: nothing comes from it, and it reads nothing.
    """

    def __init__(self, *, stopped: bool = False) -> None:
        self.sent: SimpleQueue[tuple[int, Tensor]] = SimpleQueue()
        self.ended, self._gone, self._read = (threading.Event() for _ in range(3))
        self._read.set()
        self._of_second = self.ended if stopped else self._gone
        self._gone.set()

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 3

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> Sent:
        self.sent.put((rank, tensors[0]))
        return Sent(self._of_second if rank == 1 else self._read)

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> Work:
        return Work(self._of_second if rank == 1 else self.ended)

    def told(self, code: MessageCode) -> tuple[int, str]:
        """Whom the office has told something next, and the text."""
        while True:
            rank, message = self.sent.get(timeout=PATIENCE)
            frame = torch.empty(FRAME, dtype=torch.uint8)
            frame[: len(message)] = message
            header, content = open_message(frame, lambda room: None)
            if header.code == code:
                return rank, bytes(content).decode()


NOBODY: Any = Mock()  # takes what comes


def test_who_noticed_a_loss_is_named_by_its_global_rank() -> None:
    """Once it was named by its rank in the pipeline, which differs in a second replica."""
    group: Any = PlayedGroup()
    office = Office(group, (4, 5, 6), timedelta(seconds=PATIENCE))
    office.listen()

    rank, text = group.told(MessageCode.LOST)
    assert (rank, json.loads(text)) == (2, [[1], "is lost: closed, as rank 4 noticed"])

    group.ended.set()
    office.close()


def test_process_that_others_know_as_lost_is_neither_told_nor_awaited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once each pipeline of a process waited for a stopped one until it had noticed it itself."""
    monkeypatch.setattr("lightning_gpipe.core.transport.process_group.office.TELL_TIMEOUT", NEVER)
    group: Any = PlayedGroup(stopped=True)
    office = Office(group, (4, 5, 6), timedelta(seconds=NEVER))
    office.listen()
    lost: list[tuple[list[int], str]] = []
    office.on_lost = lambda ranks, how: lost.append((list(ranks), how))
    telling = threading.Thread(target=office.tell, args=(OwnError("burnt"),))
    telling.start()
    assert [group.told(MessageCode.FAILURE)[0] for _ in range(2)] == [1, 2]

    office.hear_of_loss([5, 9], "is lost: it says nothing")
    telling.join(PATIENCE)
    closing = threading.Thread(target=office.close)
    closing.start()

    assert group.told(MessageCode.END)[0] == 2
    group.ended.set()  # the others end too
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
    aborted = threading.Event()
    monkeypatch.setattr(f"{place}.wire.links.abort_gloo", lambda *_: aborted.set())
    group: Any = PlayedGroup(stopped=True)
    office = Office(group, (4, 5, 6), timedelta(seconds=PATIENCE))
    office.listen()
    threading.Thread(target=office.leave).start()

    assert not aborted.wait(0.5)

    group.ended.set()
    assert aborted.wait(PATIENCE)


class Came:
    """A receive that has ended."""

    def wait(self, timeout: timedelta) -> None:
        pass


class SpeakingGroup(PlayedGroup):
    """The second process tells something, and then nothing more, or it has closed the connection.

    Attributes:
        heard: Set when it is known that it has told something.
    """

    def __init__(self, code: MessageCode, text: str = "", *, closed: bool = False) -> None:
        super().__init__(stopped=not closed)
        self.heard = threading.Event()
        self._message, _ = seal(Header(code, 1, origin=1), text.encode())
        self._closed = closed
        self._receives = 0

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> Sent:
        if rank == 1 and self._closed:
            raise RuntimeError("closed")
        return super().send(tensors, rank, tag)

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> Any:
        if rank == 1:
            self._receives += 1
            if self._receives == 1:
                tensors[0][: len(self._message)] = self._message
                return Came()
            if self._receives == 3:  # two at once, and one more after the first has come
                self.heard.set()
        return super().recv(tensors, rank, tag)


def test_process_that_has_closed_after_its_end_is_not_lost() -> None:
    """Once it was, where its end was read late: the answer came to nobody."""
    group: Any = SpeakingGroup(MessageCode.END, closed=True)
    office = Office(group, (4, 5, 6), timedelta(seconds=NEVER))
    lost: list[Any] = []
    office.on_lost = lambda *loss: lost.append(loss)
    office.listen()
    assert awaited(lambda: office.absence() is not None, True)

    group.ended.set()  # the third ends too
    office.close()

    assert [5] not in [ranks for ranks, _ in lost]


class ClosingGroup(SpeakingGroup):
    """The second process sends a heartbeat, then its end, and closes the connection at once."""

    def __init__(self) -> None:
        super().__init__(MessageCode.BEAT, json.dumps([{}, []]))
        self._end, _ = seal(Header(MessageCode.END, 1, origin=1), b"")

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> Any:
        if rank == 1 and self._receives == 1:
            self._receives += 1
            tensors[0][: len(self._end)] = self._end
            return Came()
        if rank == 1 and self._receives == 2:
            raise RuntimeError("closed")
        return super().recv(tensors, rank, tag)


def test_last_message_of_a_process_that_has_closed() -> None:
    """Once it was not read, and the process taken for lost, which aborted the user's collectives.

    No receive can be posted any more when the message before it is read.
    """
    group: Any = ClosingGroup()
    office = Office(group, (4, 5, 6), timedelta(seconds=NEVER))
    lost: list[Any] = []
    office.on_lost = lambda *loss: lost.append(loss)
    office.listen()

    assert awaited(lambda: office.absence() is not None or bool(lost), True)

    assert lost == []
    group.ended.set()  # the third ends too
    office.close()


def test_pipeline_that_is_freed_on_a_thread_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it did not wait for this thread, so the other processes took its own for lost."""
    place = "lightning_gpipe.core.transport.process_group"
    monkeypatch.setattr(f"{place}.office.TELL_TIMEOUT", 0.05)
    aborted, listening, freed = threading.Event(), threading.Event(), list[str]()
    monkeypatch.setattr(f"{place}.wire.links.abort_gloo", lambda *_: aborted.set())
    group: Any = SpeakingGroup(MessageCode.BEAT, json.dumps([{}, []]))
    group.size = lambda: 2
    office = Office(group, (4, 5), timedelta(seconds=NEVER))

    def collect_garbage(rank: int) -> None:
        listening.wait(PATIENCE)
        freed.append(threading.current_thread().name)
        office.leave()

    monkeypatch.setattr(office, "on_message", collect_garbage)
    office.listen()
    listening.set()

    assert not aborted.wait(0.5)

    assert freed == ["gpipe-from-rank-1"]
    group.ended.set()  # the other process ends too
    assert aborted.wait(PATIENCE)


def test_loss_that_another_connection_tells_of_a_process_that_is_heard() -> None:
    """Once a Trainer of an earlier fit, which one process had freed, ended the present one."""
    group: Any = SpeakingGroup(MessageCode.BEAT, json.dumps([{}, []]))
    office = Office(group, (4, 5, 6), timedelta(seconds=NEVER))
    office.listen()
    assert group.heard.wait(PATIENCE)

    office.hear_of_loss([5, 6], "is lost: nothing was heard")

    failure = office.failure(0.0)
    assert failure is not None and failure.ranks == (2,)
    group.ended.set()
    office.close()


def test_process_that_has_ended_is_told_but_not_awaited() -> None:
    """Once one that ended last waited for five seconds: the others read nothing any more."""
    group: Any = PlayedGroup(stopped=True)
    links = Links(group, NOBODY, Channels(None, 0))
    links.start()
    links[1].rest()

    told = links.over(links.tell(Header(MessageCode.CLOSED, 0)))

    assert told.wait(PATIENCE)
    assert [group.told(MessageCode.CLOSED)[0] for _ in range(2)] == [1, 2]
    group.ended.set()
    links.end()


def test_heartbeat_of_hours_to_a_process_that_has_ended() -> None:
    """Once it waited for the first of a thousand beats, so the others took it for lost."""
    group: Any = PlayedGroup(stopped=True)
    links = Links(group, NOBODY, Channels(None, 0))

    def beat() -> None:
        for _ in range(1_010):
            links[1].beat("")

    beats = threading.Thread(target=beat, daemon=True)
    beats.start()
    beats.join(PATIENCE)

    assert not beats.is_alive()


class ForgettingGroup(PlayedGroup):
    """All that it is given to send is sent at once, and it keeps nothing.

    Attributes:
        messages: Those that it was given, for as long as anybody else keeps them.
    """

    def __init__(self) -> None:
        super().__init__(stopped=True)
        self.messages: weakref.WeakSet[Tensor] = weakref.WeakSet()

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> Any:
        self.messages.add(tensors[0])
        return Came()


def test_copies_of_values_are_freed_after_their_phase() -> None:
    """Once those of sixteen mini-batches were kept, so the heap grew by 67 MB."""
    group: Any = ForgettingGroup()
    links = Links(group, NOBODY, Channels(None, 0))
    links.start()
    for i in range(8):
        value = FlatTree([torch.ones(1 << 16)], LEAF_SPEC)
        links.post(2, Header(MessageCode.VALUES, 1), Mail(Action(Kind.FORWARD, i, 1), None, value))
    assert len(group.messages) == 8

    links.settle(lambda: None)

    assert awaited(lambda: len(group.messages), 0) == 0
    group.ended.set()
    links.end()


class Unread(Came):
    """A send that another process does not read, until that is allowed."""

    def __init__(self) -> None:
        self.allowed = threading.Event()

    def wait(self, timeout: timedelta) -> None:
        self.allowed.wait(NEVER)


def test_copies_that_a_process_does_not_read_hold_nobody_up() -> None:
    group: Any = PlayedGroup(stopped=True)
    links = Links(group, NOBODY, Channels(None, 0))
    links.start()
    unread, content = Unread(), torch.empty(1 << 21, dtype=torch.uint8)
    links._copies = [PendingSend(unread, content, copied=True)]

    for _ in range(2):  # also where they were waited for before
        links._sends = [PendingSend(Came(), content, copied=False)]
        links.settle(partial(pytest.fail, "it waits"))

    unread.allowed.set()
    group.ended.set()
    links.end()
