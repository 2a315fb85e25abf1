"""What goes in one message: a header, and behind it as many small values as there are.

A message costs two processes some system calls and a handover between threads each, whatever its
size: next to that, copying some hundred kilobytes is little. So the bytes of small tensors go with
the header; only those of large ones go by themselves, as they lie in memory. And the results of a
run, for which the others wait until its end, go together::

    header | slot, size, body, small tensors | slot, size, body, small tensors | ...
    large tensor
    large tensor

The receiver cannot know how long a message is, so it waits with a frame: room that is long enough
for most. The header says how much comes behind it, and what does not fit into a frame goes like a
large tensor.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from lightning_gpipe.core.transport.process_group.message import HEADER_SIZE, Header

FRAME = 1 << 21  # bytes
LARGE = 1 << 19  # bytes of a tensor that goes by itself

_ITEM = struct.Struct("=qq")  # the slot of a body, and its bytes: 0 if it is remembered


def is_large(content: Tensor) -> bool:
    """Whether the bytes of a tensor go by themselves."""
    return content.numel() > LARGE


class Envelope:
    """Values that will go in one message.

    Attributes:
        large: The bytes of the tensors that go after it.
    """

    def __init__(self) -> None:
        self.large: list[Tensor] = []
        self._parts: list[bytes] = []
        self._size = 0

    def add(self, slot: int, body: bytes, tensors: Sequence[Tensor]) -> None:
        """Add a value.

        Args:
            slot: Where the receiver remembers its body.
            body: The body; nothing if the receiver has it.
            tensors: The bytes of its tensors, which are copied unless they are large.
        """
        small = [each.numpy().tobytes() for each in tensors if not is_large(each)]
        self._parts += (_ITEM.pack(slot, len(body)), body, *small)
        self._size += _ITEM.size + len(body) + sum(map(len, small))
        self.large += filter(is_large, tensors)

    @property
    def full(self) -> bool:
        """Whether no more should be added before it goes."""
        return bool(self.large) or self._size > FRAME // 2

    def sealed(self, header: Header) -> tuple[Tensor, Tensor | None]:
        """The message, and the content that goes after it if it does not fit into a frame."""
        return sealed(header, *self._parts)


def sealed(header: Header, *content: bytes) -> tuple[Tensor, Tensor | None]:
    """A message of a header and any content, see :meth:`Envelope.sealed`."""
    size = sum(map(len, content))
    first = header._replace(size=size).encoded()
    if len(first) + size > FRAME:
        return _joined(first), _joined(*content)
    return _joined(first, *content), None


def opened(frame: Tensor, receive: Callable[[Tensor], None]) -> tuple[Header, memoryview]:
    """The header and the content of a message.

    Args:
        frame: Where it came.
        receive: Receives what goes after it.
    """
    came = frame.numpy().data
    header = Header.decoded(came)
    end = HEADER_SIZE + header.size
    if end <= FRAME:
        return header, came[HEADER_SIZE:end]
    content = torch.empty(header.size, dtype=torch.uint8)
    receive(content)
    return header, content.numpy().data


class Reader:
    """Reads the values of a message, one after another.

    Args:
        content: Of the message.
        receive: Receives what goes after it.
    """

    def __init__(self, content: memoryview, receive: Callable[[Tensor], None]) -> None:
        self._content = content
        self._receive = receive
        self._at = 0

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        """For each value the slot of its body, and the body if it came; then its tensors follow."""
        while self._at < len(self._content):
            slot, size = _ITEM.unpack(self._next(_ITEM.size))
            yield slot, bytes(self._next(size))

    def fill(self, room: Tensor) -> None:
        """Fill in the bytes of the next tensor."""
        if is_large(room):
            self._receive(room)
        else:
            room.numpy().data[:] = self._next(room.numel())

    def _next(self, size: int) -> memoryview:
        start, self._at = self._at, self._at + size
        return self._content[start : self._at]


def _joined(*parts: bytes) -> Tensor:
    return torch.frombuffer(bytearray().join(parts), dtype=torch.uint8)
