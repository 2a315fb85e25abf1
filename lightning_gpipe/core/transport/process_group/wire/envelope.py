"""One message: a header, and behind it as many small values as there are.

A message costs two processes some system calls and a handover between threads each. So the bytes of
small tensors go with the header, and only large ones by themselves, to where they belong. The
results of a run, which the others need at its end only, go together::

    header | size, body, small tensors | size, body, small tensors | ...
    large tensor
    large tensor
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from lightning_gpipe.core.transport.process_group.wire.message import Header

FULL = 1 << 20  # bytes; a message of more is not held back
LARGE = 1 << 16  # the same; a larger tensor goes by itself

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
        return bool(self.large) or self._size > FULL

    def seal(self, header: Header) -> list[memoryview]:
        """Return the parts of the message; large tensors follow it."""
        return seal(header, *self._parts)


def seal(header: Header, *content: bytes | memoryview) -> list[memoryview]:
    """Return a message of a header and any content, in parts."""
    first = header._replace(size=sum(map(len, content))).encode()
    return [memoryview(part) for part in (first, *content)]


class Reader:
    """Reads the values of a message, one after another; ``receive`` fills large tensors."""

    def __init__(self, content: memoryview, receive: Callable[[memoryview], None]) -> None:
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
            self._receive(room.numpy().data)
        else:
            room.numpy().data[:] = self._next(room.numel())
        self.tensors.append(room)

    def _next(self, size: int) -> memoryview:
        start, self._at = self._at, self._at + size
        return self._content[start : self._at]


def _is_large(content: Tensor) -> bool:
    return content.numel() > LARGE
