"""The connection to one other process.

Sending returns at once; the memory of large tensors must stay unchanged until their sends have
ended. A thread receives all messages in order, and delivers them. They go through the memory of the
hosts; tensors that go straight between GPUs follow their announcement on a channel.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Protocol

from torch import Tensor

from lightning_gpipe.core.transport.process_group.wire.channels import (
    ArrivingTensors,
    ChannelAborted,
    Channels,
)
from lightning_gpipe.core.transport.process_group.wire.envelope import Envelope, Reader, seal
from lightning_gpipe.core.transport.process_group.wire.message import (
    ALL,
    HEADER_SIZE,
    Header,
    Mail,
    MessageCode,
)
from lightning_gpipe.core.transport.process_group.wire.sockets import Sockets
from lightning_gpipe.core.transport.process_group.wire.tcp_connection import ConnectionBroken, Send
from lightning_gpipe.core.transport.process_group.wire.tensor_bytes import GpuPair

_PIECE = 1 << 24  # bytes that are read at a time, so that something is heard while much is sent
_COMMON = attrgetter("serial", "label", "origin", "to")  # of values that go after one header
_KEPT = 1 << 21  # bytes of the largest buffer that is kept for later messages


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

    ``rests``: nothing is received, since one of both has ended.
    """

    def __init__(self, sockets: Sockets, rank: int, receiver: Receiver, channels: Channels) -> None:
        self.rank = rank
        self._sockets = sockets
        self._connection = sockets.connection(rank)
        self._receiver = receiver
        self._channels = channels
        self._lock = threading.RLock()  # the parts of a message must stay together
        # Announcements and their sends must be in one order. It is no matter of the other lock, as
        # the first send on a channel waits for the other process, which must be told before.
        self._straight = threading.Lock()
        self._envelope = Envelope()  # the values that are held back
        self._envelope_header: Header | None = None  # None if the envelope is empty
        self._header = memoryview(bytearray(HEADER_SIZE))  # of the message that is read
        self._content = memoryview(b"")  # the same; it is used again for the next one
        self._thread: threading.Thread | None = None
        self.rests = True

    @property
    def reads(self) -> bool:
        """True while the other process may be expected to read messages."""
        return self._connection.established.is_set() and not self.rests

    def connect(self) -> None:
        """Wait until the other process connects too."""
        self._sockets.connect(self.rank)

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
    ) -> list[Send]:
        """Send a header and a value; if ``hold``, with the next one or at :meth:`flush`."""
        with self._lock:
            first = self._envelope_header
            together = first is None or _COMMON(first) == _COMMON(header)
            sends = [] if together else self.flush()
            try:
                self._envelope.add(body, tensors)
                self._envelope_header = header
            except BaseException:  # Ctrl-C: a part of a value must not go with the next one
                self._envelope, self._envelope_header = Envelope(), None
                raise
            return sends if hold and not self._envelope.full else sends + self.flush()

    def post_straight(self, header: Header, mail: Mail, ahead: Sequence[bytes] = ()) -> list[Send]:
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

    def flush(self) -> list[Send]:
        with self._lock:
            if self._envelope_header is None:
                return []
            envelope, header = self._envelope, self._envelope_header
            self._envelope, self._envelope_header = Envelope(), None
            large = [content.numpy().data for content in envelope.large]
            send = self._connection.send(envelope.seal(header), large)
            return [send] if large and send is not None else []

    def tell(self, header: Header, text: str = "") -> list[Send]:
        with self._lock:
            sends = self.flush()
            told = self._connection.send(seal(header, text.encode()))
            return sends if told is None else [*sends, told]

    def beat(self, text: str) -> None:
        """Send a heartbeat with the state of this process, unless one waits to be read one day."""
        if self.rests and self._connection.waits:
            return
        with suppress(ConnectionBroken):  # the receiving thread notices the loss too
            self.tell(Header(MessageCode.BEAT, 0), text)

    def join(self, timeout: float) -> bool:
        """Wait for the receiving thread to end, which it does when the other process closes."""
        if self._thread is None or self._thread is threading.current_thread():
            return True
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _receive(self) -> None:
        try:
            self.connect()
            while True:
                header, content = self._next_message()
                if header.code == MessageCode.VALUES:
                    self._receive_values(header, content)
                elif not self._receiver.deliver(self.rank, header, bytes(content).decode()):
                    return
        except BaseException as error:
            self._connection.close(f"{error}")
            self._receiver.on_disconnect(self.rank, error)

    def _next_message(self) -> tuple[Header, memoryview]:
        self._read(self._header)
        header = Header.decode(self._header)
        if header.size > _KEPT:
            content = memoryview(bytearray(header.size))
        else:
            if header.size > len(self._content):
                self._content = memoryview(bytearray(header.size))
            content = self._content[: header.size]
        self._read(content)
        return header, content

    def _read(self, room: memoryview) -> None:
        for start in range(0, len(room), _PIECE):
            self._connection.read(room[start : start + _PIECE])
            self._receiver.on_message(self.rank)

    def _receive_values(self, header: Header, content: memoryview) -> None:
        reader = Reader(content, self._read)
        for body in reader:
            arrival = ArrivingTensors(self._channels, self.rank)
            mail = Mail.decode(body, reader.fill, arrival.receive)._replace(ready=arrival.ready)
            if header.to == ALL:
                self._receiver.relay(header, body, reader.tensors)
            self._receiver.deliver(self.rank, header, mail)
