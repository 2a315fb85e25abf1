"""One message: a header, and behind it as many small values as there are.

A message costs two processes some system calls and a handover between threads each; copying some
hundred kilobytes is little next to that. So the bytes of small tensors go with the header, and only
large ones by themselves, straight from their memory. The results of a run, which the others need at
its end only, go together::

    header | size, body, small tensors | size, body, small tensors | ...
    large tensor
    large tensor

The receiver cannot know the length of a message, so it receives into a frame that is long enough
for most messages. Bytes that do not fit into a frame go like a large tensor.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from lightning_gpipe.core.transport.process_group.wire.message import HEADER_SIZE, Header

FRAME = 1 << 21  # bytes
LARGE = 1 << 19  # bytes; a larger tensor goes by itself

_SIZE = struct.Struct("=q")  # of a body


class Envelope:
    """Collects values for one message; the bytes of ``large`` tensors go after it."""

    def __init__(self) -> None:
        self.large: list[Tensor] = []
        self._parts: list[bytes | memoryview] = []
        self._size = 0

    def add(self, body: bytes, tensors: Sequence[Tensor]) -> None:
        """Add a value: its body, and its tensors as bytes, which must not change until it goes."""
        small = [tensor.numpy().data for tensor in tensors if not _is_large(tensor)]
        self._parts += (_SIZE.pack(len(body)), body, *small)
        self._size += _SIZE.size + len(body) + sum(map(len, small))
        self.large += filter(_is_large, tensors)

    @property
    def full(self) -> bool:
        """True if the message should go before more is added."""
        return bool(self.large) or self._size > FRAME // 2

    def seal(self, header: Header) -> tuple[Tensor, Tensor | None]:
        """Return the message, and its content apart if that does not fit into a frame."""
        return seal(header, *self._parts)


def seal(header: Header, *content: bytes | memoryview) -> tuple[Tensor, Tensor | None]:
    """Return a message of a header and any content, see :meth:`Envelope.seal`."""
    size = sum(map(len, content))
    first = header._replace(size=size).encode()
    if len(first) + size > FRAME:
        return _join(first), _join(*content)
    return _join(first, *content), None


def open_message(frame: Tensor, receive: Callable[[Tensor], None]) -> tuple[Header, memoryview]:
    """Return the header and the content of a message; ``receive`` gets bytes that follow it."""
    message = frame.numpy().data
    header = Header.decode(message)
    end = HEADER_SIZE + header.size
    if end <= FRAME:
        return header, message[HEADER_SIZE:end]
    content = torch.empty(header.size, dtype=torch.uint8)
    receive(content)
    return header, content.numpy().data


class Reader:
    """Reads the values of a message, one after another; ``receive`` gets bytes that follow it."""

    def __init__(self, content: memoryview, receive: Callable[[Tensor], None]) -> None:
        self.tensors: list[Tensor] = []
        self._content = content
        self._receive = receive
        self._at = 0

    def __iter__(self) -> Iterator[bytes]:
        """Yield the body of each value; then :meth:`fill` must read its tensors."""
        while self._at < len(self._content):
            (size,) = _SIZE.unpack(self._next(_SIZE.size))
            self.tensors = []
            yield bytes(self._next(size))

    def fill(self, room: Tensor) -> None:
        if _is_large(room):
            self._receive(room)
        else:
            room.numpy().data[:] = self._next(room.numel())
        self.tensors.append(room)

    def _next(self, size: int) -> memoryview:
        start, self._at = self._at, self._at + size
        return self._content[start : self._at]


def _is_large(content: Tensor) -> bool:
    return content.numel() > LARGE


def _join(*parts: bytes | memoryview) -> Tensor:
    return torch.frombuffer(bytearray().join(parts), dtype=torch.uint8)
