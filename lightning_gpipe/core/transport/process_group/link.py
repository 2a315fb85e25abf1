"""The connection to one other process.

Sending returns at once; what was sent must stay unchanged until it has gone. A thread receives all
that comes, in order, and gives it to whoever needs it. Both ways need a backend that sends and
receives tensors of the host, such as Gloo.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_gpipe.core.data import FlatTree
from lightning_gpipe.core.plan import Action, Route
from lightning_gpipe.core.transport.process_group.bodies import Coder, Received, Sent
from lightning_gpipe.core.transport.process_group.message import (
    Code,
    Header,
    bytes_in,
    pack,
    unpack,
)

_TAG = 7_300  # of what the first pipeline of a group sends; the next have those after it
_JOIN = 5.0

Posted = tuple[Any, Tensor]  # the work of sending a tensor, and the tensor, which must live so long


class Mail(NamedTuple):
    """A value as it came.

    Attributes:
        to: What needs it.
        route: The way on which it came.
        value: The value, on the host.
        on_device: For each leaf, whether it goes to the device of the stage.
    """

    to: Action
    route: Route | None
    value: FlatTree
    on_device: list[bool]


class Link:
    """Sends to one other process, and receives from it.

    Args:
        group: The process group.
        rank: The other process.
        coder: Encodes bodies.
        deliver: Called with each header, and the value or the text that came after it.
        lost: Called with the error when nothing can come any more.
        pipeline: Which of the pipelines of the group.
    """

    def __init__(
        self,
        group: Any,  # whose stubs know neither send nor recv
        rank: int,
        coder: Coder,
        deliver: Callable[[int, Header, Mail | str | None], None],
        lost: Callable[[int, BaseException], None],
        pipeline: int = 0,
    ) -> None:
        self.rank = rank
        self._group = group
        self._coder = coder
        self._deliver = deliver
        self._lost = lost
        self._tag = _TAG + pipeline
        self._lock = threading.Lock()  # the parts of a message must stay together
        self._sent = Sent()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Receive, if that was not begun or has ended."""
        if self._thread is None or not self._thread.is_alive():
            # A daemon: no signal reaches a thread that waits for another process.
            self._thread = threading.Thread(
                target=self._receive, name=f"gpipe-from-rank-{self.rank}", daemon=True
            )
            self._thread.start()

    def post(
        self, header: Header, to: Action, route: Route | None, value: FlatTree
    ) -> list[Posted]:
        """Send a value.

        Args:
            header: What to send before it; the slot and the size of the body are added.
            to: What needs it.
            route: The way on which it goes.
            value: The value.

        Raises:
            TypeError: If something in it cannot be sent.
        """
        body, tensors = pack(to, route, value)
        encoded = self._coder.encoded(body)
        with self._lock:
            slot, changed = self._sent.slot_for(body, encoded)
            size = len(encoded) if changed else 0
            posted = [self._send(header._replace(slot=slot, size=size).encoded())]
            if changed:
                posted.append(self._send(_as_tensor(encoded)))
            return posted + [self._send(bytes_in(t)) for t in tensors if t.numel()]

    def tell(self, header: Header, text: str = "") -> list[Posted]:
        """Send a header that announces no value, and a text."""
        encoded = text.encode()
        with self._lock:
            posted = [self._send(header._replace(size=len(encoded)).encoded())]
            return posted + ([self._send(_as_tensor(encoded))] if encoded else [])

    def join(self) -> None:
        """Wait for the receiving thread to end, which it does when the other process closes."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN)

    def _send(self, tensor: Tensor) -> Posted:
        return self._group.send([tensor], self.rank, self._tag), tensor

    def _fill(self, tensor: Tensor) -> None:
        self._group.recv([tensor], self.rank, self._tag).wait()

    def _receive(self) -> None:
        received = Received(self._coder)
        words = Header.empty()
        try:
            while True:
                self._fill(words)
                header = Header.decoded(words)
                if header.code == Code.END:
                    self._deliver(self.rank, header, None)
                    return
                encoded = b""
                if header.size:
                    content = torch.empty(header.size, dtype=torch.uint8)
                    self._fill(content)
                    encoded = content.numpy().tobytes()
                if header.code == Code.FAILURE:
                    self._deliver(self.rank, header, encoded.decode())
                    continue
                body = received.body(header.slot, encoded)
                value, on_device = unpack(body, self._fill)
                self._deliver(self.rank, header, Mail(body.to, body.route, value, on_device))
        except BaseException as error:
            self._lost(self.rank, error)


def _as_tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
