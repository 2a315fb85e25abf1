"""The connection to one other process.

Sending returns at once; what was sent must stay unchanged until it has gone. A thread receives all
that comes, in order, and gives it to whoever needs it. Both ways need a backend that sends and
receives tensors of the host, such as Gloo.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import ProcessGroupGloo

from lightning_gpipe.core.data import FlatTree
from lightning_gpipe.core.plan import Action
from lightning_gpipe.core.transport.process_group.bodies import Received, Sent, encoded
from lightning_gpipe.core.transport.process_group.cutting import cut
from lightning_gpipe.core.transport.process_group.message import (
    Code,
    Header,
    Way,
    bytes_in,
    pack,
    unpack,
)

_TAG = 7_300
# A process may pause for as long as it likes: the group's timeout is for its connection only.
_PATIENCE = timedelta(days=365)
_PIECE = 1 << 24  # bytes that are sent at a time, so that something is heard while much is sent
_BEATS = 1_000  # that may be on their way

Posted = tuple[Any, Tensor]  # the work of sending a tensor, and the tensor, which must live so long


class Mail(NamedTuple):
    """A value as it came.

    Attributes:
        to: What needs it.
        way: The way on which it came.
        value: The value, on the host.
        on_device: For each leaf, whether it goes to the device of the stage.
    """

    to: Action
    way: Way
    value: FlatTree
    on_device: list[bool]


class Broken(RuntimeError):
    """Raised where a connection to another process has ended."""


class Link:
    """Sends to one other process, and receives from it.

    Args:
        group: That of all processes.
        rank: The other process.
        deliver: Called with each header, and the value or the text that came after it.
        heard: Called with the rank when anything has come.
        lost: Called with the error when nothing can come any more.
    """

    def __init__(
        self,
        group: ProcessGroupGloo,
        rank: int,
        deliver: Callable[[int, Header, Mail | str | None], None],
        heard: Callable[[int], None],
        lost: Callable[[int, BaseException], None],
    ) -> None:
        self.rank = rank
        self._group: Any = group  # whose stubs know neither send nor recv
        self._deliver = deliver
        self._heard = heard
        self._lost = lost
        self._lock = threading.RLock()  # the parts of a message must stay together
        self._sent = Sent()
        self._received = Received()  # what is remembered outlives the thread, as in the sender
        self._beats: deque[Posted] = deque()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Receive, if that was not begun or has ended."""
        if self._thread is None or not self._thread.is_alive():
            # A daemon: no signal reaches a thread that waits for another process.
            self._thread = threading.Thread(
                target=self._receive, name=f"gpipe-from-rank-{self.rank}", daemon=True
            )
            self._thread.start()

    def post(self, header: Header, to: Action, way: Way, value: FlatTree) -> list[Posted]:
        """Send a value.

        Args:
            header: What to send before it; the slot and the size of the body are added.
            to: What needs it.
            way: The way on which it goes.
            value: The value.

        Raises:
            TypeError: If something in it cannot be sent.
            Broken: If the connection is.
        """
        body, tensors = pack(to, way, value)
        content = encoded(body)
        with self._lock:
            slot, changed = self._sent.slot_for(body, content, header.label.pipeline)
            size = len(content) if changed else 0
            posted = [self._send(header._replace(slot=slot, size=size).encoded())]
            if changed:
                posted += self._send_all(_as_tensor(content))
            for tensor in tensors:
                posted += self._send_all(bytes_in(tensor))
            return posted

    def tell(self, header: Header, text: str = "") -> list[Posted]:
        """Send a header that announces no value, and a text."""
        content = text.encode()
        with self._lock:
            posted = [self._send(header._replace(size=len(content)).encoded())]
            return posted + (self._send_all(_as_tensor(content)) if content else [])

    def beat(self) -> None:
        """Let the other process hear this one."""
        with suppress(RuntimeError):  # it is lost, as the receiving thread notices
            self._beats += self.tell(Header(Code.BEAT, 0))
            while len(self._beats) > _BEATS:  # the first has gone long ago
                wait(self._beats.popleft())

    def cut(self) -> None:
        """End all connections of the group, and with them all that waits for them."""
        cut(self._group, self.rank)

    def join(self, timeout: float) -> None:
        """Wait for the receiving thread to end, which it does when the other process closes."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _send(self, tensor: Tensor) -> Posted:
        try:
            return self._group.send([tensor], self.rank, _TAG), tensor
        except RuntimeError as error:
            raise Broken(str(error)) from error

    def _send_all(self, content: Tensor) -> list[Posted]:
        return [self._send(piece) for piece in _pieces(content)]

    def _fill(self, content: Tensor) -> None:
        for piece in _pieces(content):
            self._group.recv([piece], self.rank, _TAG).wait(_PATIENCE)
            self._heard(self.rank)

    def _bytes(self, size: int) -> bytes:
        """The next bytes that come."""
        content = torch.empty(size, dtype=torch.uint8)
        if size:
            self._fill(content)
        return content.numpy().tobytes()

    def _receive(self) -> None:
        words = Header.empty()
        try:
            while True:
                self._fill(words)
                header = Header.decoded(words)
                if header.code == Code.END:
                    self._deliver(self.rank, header, None)
                    return
                content = self._bytes(header.size)
                if header.code == Code.BEAT:
                    continue
                if header.code in (Code.FAILURE, Code.LOST):
                    self._deliver(self.rank, header, content.decode())
                    continue
                body = self._received.body(header.slot, content)
                value, on_device = unpack(body, self._fill)
                self._deliver(self.rank, header, Mail(body.to, body.way, value, on_device))
        except BaseException as error:
            self._lost(self.rank, error)


def wait(posted: Posted) -> None:
    """Wait until it has gone.

    Raises:
        RuntimeError: If it cannot go any more.
    """
    posted[0].wait(_PATIENCE)


def _pieces(content: Tensor) -> Iterator[Tensor]:
    size = _PIECE // content.element_size()
    for start in range(0, content.numel(), size):
        yield content[start : start + size]


def _as_tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
