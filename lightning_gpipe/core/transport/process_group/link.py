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
from lightning_gpipe.core.transport.process_group.bodies import Received, Sent
from lightning_gpipe.core.transport.process_group.cutting import cut
from lightning_gpipe.core.transport.process_group.envelope import (
    FRAME,
    Envelope,
    Reader,
    opened,
    sealed,
)
from lightning_gpipe.core.transport.process_group.message import Code, Header, Way, pack, unpack

_TAG, _TAG_AFTER = 7_300, 7_301  # of messages, and of what goes after them
# A process may pause for as long as it likes: the group's timeout is for its connection only.
_PATIENCE = timedelta(days=365)
_PIECE = 1 << 24  # bytes that are sent at a time, so that something is heard while much is sent
_BEATS = 1_000  # that may be on their way
_AHEAD = 2  # messages that are waited for: the next comes while one is read


class Posted(NamedTuple):
    """Bytes on their way.

    Attributes:
        work: Waits until they have gone.
        content: The bytes, which must live so long.
        copied: Whether nobody else has them; if not, they must not be changed until then.
    """

    work: Any
    content: Tensor
    copied: bool


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
        deliver: Called with each header, and the value or the text that came after it; returns
            whether more will come.
        heard: Called with the rank when anything has come.
        lost: Called with the error when nothing can come any more.
    """

    def __init__(
        self,
        group: ProcessGroupGloo,
        rank: int,
        deliver: Callable[[int, Header, Mail | str], bool],
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
        self._held = Envelope()
        self._held_for: Header | None = None
        self._awaited: deque[tuple[Any, Tensor]] = deque()  # frames, and the work of filling them
        self._read = _frame()  # what came last: it is awaited again with the next
        self._thread: threading.Thread | None = None
        self._rests = True

    def start(self) -> None:
        """Receive, if that was not begun or has ended."""
        if self._rests:
            self._rests = False
            # A daemon: no signal reaches a thread that waits for another process.
            self._thread = threading.Thread(
                target=self._receive, name=f"gpipe-from-rank-{self.rank}", daemon=True
            )
            self._thread.start()

    def rest(self) -> None:
        """Receive nothing until :meth:`start`; for the receiving thread, which returns then."""
        self._rests = True

    def post(
        self, header: Header, to: Action, way: Way, value: FlatTree, *, hold: bool = False
    ) -> list[Posted]:
        """Send a value.

        Args:
            header: What to send before it.
            to: What needs it.
            way: The way on which it goes.
            value: The value.
            hold: Whether it may wait for the next, or for :meth:`flush`, to go with it.

        Raises:
            TypeError: If something in it cannot be sent.
            Broken: If the connection is.
        """
        body, tensors = pack(to, way, value)
        with self._lock:
            posted = [] if self._held_for is None or self._goes_with(header) else self.flush()
            slot, content = self._sent.slot_for(body, header.label.pipeline)
            self._held.add(slot, content, tensors)
            self._held_for = header
            return posted if hold and not self._held.full else posted + self.flush()

    def flush(self) -> list[Posted]:
        """Send what is held."""
        with self._lock:
            if self._held_for is None:
                return []
            held, header = self._held, self._held_for
            self._held, self._held_for = Envelope(), None
            posted = self._send_sealed(*held.sealed(header))
            return posted + [each for tensor in held.large for each in self._send_all(tensor)]

    def tell(self, header: Header, text: str = "") -> list[Posted]:
        """Send a header that announces no value, and a text."""
        with self._lock:
            return self.flush() + self._send_sealed(*sealed(header, text.encode()))

    def beat(self) -> None:
        """Let the other process hear this one."""
        with suppress(RuntimeError):  # it is lost, as the receiving thread notices
            self._beats += self._send_sealed(*sealed(Header(Code.BEAT, 0)))
            while len(self._beats) > _BEATS:  # the first has gone long ago
                wait(self._beats.popleft())

    def cut(self) -> None:
        """End all connections of the group, and with them all that waits for them."""
        cut(self._group, self.rank)

    def join(self, timeout: float) -> None:
        """Wait for the receiving thread to end, which it does when the other process closes."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _goes_with(self, header: Header) -> bool:
        """Whether what is held is of the same exchange."""
        held = self._held_for
        return held is not None and (held.serial, held.label) == (header.serial, header.label)

    def _send(self, content: Tensor, tag: int, *, copied: bool) -> Posted:
        try:
            return Posted(self._group.send([content], self.rank, tag), content, copied)
        except RuntimeError as error:
            raise Broken(str(error)) from error

    def _send_sealed(self, message: Tensor, after: Tensor | None) -> list[Posted]:
        posted = [self._send(message, _TAG, copied=True)]
        return posted if after is None else posted + self._send_all(after, copied=True)

    def _send_all(self, content: Tensor, *, copied: bool = False) -> list[Posted]:
        return [self._send(piece, _TAG_AFTER, copied=copied) for piece in _pieces(content)]

    def _next_frame(self) -> Tensor:
        """The next message that comes."""
        while len(self._awaited) < _AHEAD:
            self._await_in(_frame())
        work, frame = self._awaited.popleft()
        work.wait(_PATIENCE)
        self._heard(self.rank)
        self._await_in(self._read)  # before this one is read: what waits for a message gets it soon
        self._read = frame
        return frame

    def _await_in(self, frame: Tensor) -> None:
        self._awaited.append((self._group.recv([frame], self.rank, _TAG), frame))

    def _receive_after(self, content: Tensor) -> None:
        """Receive what goes after a message."""
        for piece in _pieces(content):
            self._group.recv([piece], self.rank, _TAG_AFTER).wait(_PATIENCE)
            self._heard(self.rank)

    def _receive(self) -> None:
        try:
            while True:
                header, content = opened(self._next_frame(), self._receive_after)
                if header.code == Code.BEAT:
                    continue
                if header.code == Code.VALUES:
                    self._receive_values(header, content)
                elif not self._deliver(self.rank, header, bytes(content).decode()):
                    return
        except BaseException as error:
            self._lost(self.rank, error)

    def _receive_values(self, header: Header, content: memoryview) -> None:
        reader = Reader(content, self._receive_after)
        for slot, came in reader:
            body = self._received.body(slot, came)
            value, on_device = unpack(body, reader.fill)
            self._deliver(self.rank, header, Mail(body.to, body.way, value, on_device))


def wait(posted: Posted) -> None:
    """Wait until it has gone.

    Raises:
        RuntimeError: If it cannot go any more.
    """
    posted.work.wait(_PATIENCE)


def _frame() -> Tensor:
    return torch.empty(FRAME, dtype=torch.uint8)


def _pieces(content: Tensor) -> Iterator[Tensor]:
    size = _PIECE // content.element_size()
    for start in range(0, content.numel(), size):
        yield content[start : start + size]
