"""The connection to one other process.

Sending returns at once; the memory must stay unchanged until the send has completed. A thread
receives all messages in order, and delivers them. Both need a backend for host tensors, such as
Gloo; the tensors of a value that go straight between GPUs follow it on a channel.

Gloo connects two processes when the first message goes between them, and waits until both have one.
So a link connects on its own thread, or before it starts, and sends wait in a queue until it has.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import ProcessGroupGloo

from lightning_gpipe.core.transport.process_group.wire.channels import (
    ArrivingTensors,
    ChannelAborted,
    Channels,
)
from lightning_gpipe.core.transport.process_group.wire.envelope import (
    FRAME,
    Envelope,
    Reader,
    open_message,
    seal,
)
from lightning_gpipe.core.transport.process_group.wire.message import ALL, Header, Mail, MessageCode
from lightning_gpipe.core.transport.process_group.wire.tensor_bytes import GpuPair

_TAG, _TAG_AFTER = 7_300, 7_301  # of messages, and of the bytes that go after them
# A process may pause for as long as it likes: the group's timeout is for its connection only.
_PATIENCE = timedelta(days=365)
_PIECE = 1 << 24  # bytes that are sent at a time, so that something is heard while much is sent
_BEATS = 1_000  # the most that may be on their way
_AHEAD = 2  # receives in flight: the next message arrives while one is read


class PendingWork(Protocol):
    """A send of torch.distributed, or one that waits for a connection."""

    def wait(self, timeout: timedelta) -> object: ...


class QueuedSend:
    """A send that begins once there is a connection."""

    def __init__(self, begin: Callable[[], PendingWork]) -> None:
        self._begin = begin
        self._begun: Future[PendingWork] = Future()

    def begin(self) -> None:
        try:
            self._begun.set_result(self._begin())
        except RuntimeError as error:
            self._begun.set_exception(error)

    def fail(self, error: BaseException) -> None:
        """End the wait for it with an error: there will be no connection."""
        self._begun.set_exception(error)

    def wait(self, timeout: timedelta) -> object:
        return self._begun.result(timeout.total_seconds()).wait(timeout)


class PendingSend(NamedTuple):
    """Bytes on their way."""

    work: PendingWork  # the send in torch.distributed
    content: Tensor  # the bytes, which must live until it has completed
    copied: bool  # if nobody else has them; else they must not be changed until then

    def wait(self) -> None:
        self.work.wait(_PATIENCE)


class ConnectionBroken(RuntimeError):
    """Raised where a connection to another process has ended."""


class Receiver(Protocol):
    """Takes the messages that come over links, on their threads."""

    def on_message(self, rank: int) -> None:
        """Note that a message has come from a process."""

    def relay(self, header: Header, body: bytes, tensors: Sequence[Tensor]) -> None:
        """Pass on a value for all processes."""

    def deliver(self, rank: int, header: Header, content: Mail | str) -> bool:
        """Take a header, and the value or the text after it; return False if no more will come."""

    def on_disconnect(self, rank: int, error: BaseException) -> None:
        """Note that a connection has ended."""


class Link:
    """Sends to one other process, and receives from it.

    ``rests``: nothing is received, since one of both has ended; ``connected``: both have connected.
    """

    def __init__(
        self, group: ProcessGroupGloo, rank: int, receiver: Receiver, channels: Channels
    ) -> None:
        self.rank = rank
        self._group: Any = group  # the stubs have neither send nor recv
        self._receiver = receiver
        self._channels = channels
        self.connected = threading.Event()
        self._queue: list[QueuedSend] = []  # until then
        self._failure: BaseException | None = None  # to receive
        self._lock = threading.RLock()  # the parts of a message must stay together
        # Announcements and their sends must be in one order. It is no matter of the other lock, as
        # the first send on a channel waits for the other process, which must be told before.
        self._straight = threading.Lock()
        self._beats: deque[PendingSend] = deque()
        self._envelope = Envelope()  # the values that are held back
        self._envelope_header: Header | None = None  # None if the envelope is empty
        self._receives: deque[tuple[Any, Tensor]] = deque()  # in flight, with their frames
        self._last_frame = _frame()  # of the last message; it is used again for the next receive
        self._thread: threading.Thread | None = None
        self.rests = True

    @property
    def reads(self) -> bool:
        """True while the other process may be expected to read messages."""
        return self.connected.is_set() and not self.rests

    def connect(self) -> None:
        """Wait until the other process connects too, and send the queue."""
        while len(self._receives) < _AHEAD:
            self._receive_into(_frame())
        with self._lock:
            for send in self._queue:
                send.begin()
            self._queue.clear()
            self.connected.set()

    def start(self) -> None:
        if self.rests:
            self.rests = False
            # A daemon: no signal reaches a thread that waits for another process.
            self._thread = threading.Thread(
                target=self._receive, name=f"gpipe-from-rank-{self.rank}", daemon=True
            )
            self._thread.start()

    def rest(self) -> None:
        """Receive nothing until :meth:`start`; called on the receiving thread, which returns."""
        self.rests = True

    def post(
        self, header: Header, body: bytes, tensors: Sequence[Tensor], *, hold: bool = False
    ) -> list[PendingSend]:
        """Send a header and a value; if ``hold``, with the next one or at :meth:`flush`."""
        with self._lock:
            first = self._envelope_header
            same = first is None or (first.serial, first.label) == (header.serial, header.label)
            sends = [] if same else self.flush()
            self._envelope.add(body, tensors)
            self._envelope_header = header
            return sends if hold and not self._envelope.full else sends + self.flush()

    def post_straight(
        self, header: Header, mail: Mail, ahead: Sequence[bytes] = ()
    ) -> list[PendingSend]:
        """Announce a value, and values ahead, and send its tensors from GPU to GPU."""
        assert mail.gpus is not None, "they are known"
        body, tensors = mail.encode()
        on_host = [content for content in tensors if content.device.type == "cpu"]
        on_gpu = [content for content in tensors if content.device.type != "cpu"]
        with self._straight:
            with self._lock:
                sends = self.post(header, body, on_host, hold=True)
                for announcement in ahead:
                    sends += self.post(header, announcement, (), hold=True)
                sends += self.flush()
            self.send_straight(mail.gpus, on_gpu)
        return sends

    def send_straight(self, gpus: GpuPair, tensors: Sequence[Tensor]) -> None:
        try:
            self._channels.send(self.rank, gpus, tensors)
        except ChannelAborted as error:
            raise ConnectionBroken(str(error)) from error

    def flush(self) -> list[PendingSend]:
        with self._lock:
            if self._envelope_header is None:
                return []
            envelope, header = self._envelope, self._envelope_header
            self._envelope, self._envelope_header = Envelope(), None
            sends = self._send_message(*envelope.seal(header))
            return sends + [send for large in envelope.large for send in self._send_pieces(large)]

    def tell(self, header: Header, text: str = "") -> list[PendingSend]:
        with self._lock:
            return self.flush() + self._send_message(*seal(header, text.encode()))

    def beat(self, text: str) -> None:
        """Send a heartbeat with the state of this process; not more than will be read one day."""
        if self.rests and len(self._beats) == _BEATS:
            return
        # The receiving thread notices the loss too.
        with suppress(RuntimeError), self._lock:
            self._beats += self._send_message(*seal(Header(MessageCode.BEAT, 0), text.encode()))
            while len(self._beats) > _BEATS:  # the first was sent long ago
                self._beats.popleft().wait()

    def join(self, timeout: float) -> bool:
        """Wait for the receiving thread to end, which it does when the other process closes."""
        if self._thread is None or self._thread is threading.current_thread():
            return True
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _send(self, content: Tensor, tag: int, *, copied: bool) -> PendingSend:
        begin = partial(self._group.send, [content], self.rank, tag)
        if self._failure is not None:
            raise ConnectionBroken(str(self._failure))
        if not self.connected.is_set():
            send = QueuedSend(begin)
            self._queue.append(send)
            return PendingSend(send, content, copied)
        try:
            return PendingSend(begin(), content, copied)
        except RuntimeError as error:
            raise ConnectionBroken(str(error)) from error

    def _send_message(self, message: Tensor, after: Tensor | None) -> list[PendingSend]:
        sends = [self._send(message, _TAG, copied=True)]
        return sends if after is None else sends + self._send_pieces(after, copied=True)

    def _send_pieces(self, content: Tensor, *, copied: bool = False) -> list[PendingSend]:
        return [self._send(piece, _TAG_AFTER, copied=copied) for piece in _pieces(content)]

    def _next_frame(self) -> Tensor:
        if not self._receives:
            self._receive_into(self._last_frame)
        work, frame = self._receives.popleft()
        work.wait(_PATIENCE)
        self._receiver.on_message(self.rank)
        # Before this message is read: the next comes sooner. If the other process has closed the
        # connection, its last message may be here all the same.
        with suppress(RuntimeError):
            self._receive_into(self._last_frame)
        self._last_frame = frame
        return frame

    def _receive_into(self, frame: Tensor) -> None:
        self._receives.append((self._group.recv([frame], self.rank, _TAG), frame))

    def _receive_after(self, content: Tensor) -> None:
        for piece in _pieces(content):
            self._group.recv([piece], self.rank, _TAG_AFTER).wait(_PATIENCE)
            self._receiver.on_message(self.rank)

    def _receive(self) -> None:
        try:
            self.connect()
            while True:
                header, content = open_message(self._next_frame(), self._receive_after)
                if header.code == MessageCode.VALUES:
                    self._receive_values(header, content)
                elif not self._receiver.deliver(self.rank, header, bytes(content).decode()):
                    return
        except BaseException as error:
            with self._lock:
                self._failure = error
                for send in self._queue:
                    send.fail(error)
                self._queue.clear()
            self._receiver.on_disconnect(self.rank, error)

    def _receive_values(self, header: Header, content: memoryview) -> None:
        reader = Reader(content, self._receive_after)
        for body in reader:
            arrival = ArrivingTensors(self._channels, self.rank)
            mail = Mail.decode(body, reader.fill, arrival.receive)._replace(ready=arrival.ready)
            if header.to == ALL:
                self._receiver.relay(header, body, reader.tensors)
            self._receiver.deliver(self.rank, header, mail)


def _frame() -> Tensor:
    return torch.empty(FRAME, dtype=torch.uint8)


def _pieces(content: Tensor) -> Iterator[Tensor]:
    size = _PIECE // content.element_size()
    for start in range(0, content.numel(), size):
        yield content[start : start + size]
