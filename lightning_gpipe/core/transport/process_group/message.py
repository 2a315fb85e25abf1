"""What one process sends to another: a header, a body where it changed, and the bytes of tensors.

A header of a fixed size always goes first, because the receiver cannot know by itself what comes
next. The body says what the tensors are and how they are nested. It is the same in most steps, so
it is sent when it differs from the one before, in the same slot, and remembered by the receiver.
How all that is put together is in :mod:`envelope
<lightning_gpipe.core.transport.process_group.envelope>`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Hashable
from enum import IntEnum
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_gpipe.core.data import MARKS, FlatTree, identity
from lightning_gpipe.core.plan import Action, Route
from lightning_gpipe.core.transport.interface import Label


class Code(IntEnum):
    """What a header announces."""

    VALUES = 1  # what actions need
    FAILURE = 2  # that a run failed, and how
    CLOSED = 3  # that no exchange is begun until others have closed too
    END = 4  # that nothing more comes
    ANSWER = 5  # that an end was heard, by one that goes on
    BEAT = 6  # that the process lives
    LOST = 7  # that another one does not, and how that was noticed


class Header(NamedTuple):
    """What is sent before anything else: integers, of a fixed number.

    Attributes:
        code: A :class:`Code`.
        serial: The number of the exchange; see :class:`Ledger`.
        label: What the exchange is of.
        size: The bytes that come behind it.
        bits: Those that are signalled; of one that closes, whether another one did so before.
        closed: Of one that closes, how often it has.
        version: That of this format.
    """

    code: int
    serial: int
    label: Label = Label()
    size: int = 0
    bits: int = 0
    closed: int = 0
    version: int = 3

    def encoded(self) -> bytes:
        """As bytes to send."""
        code, serial, label, *others = self
        return _HEADER.pack(code, serial, *label, *others)

    @classmethod
    def decoded(cls, content: memoryview) -> Header:
        """From the bytes that came, and maybe more."""
        code, serial, *words = _HEADER.unpack_from(content)
        end = len(Label._fields)
        return cls(code, serial, Label(*words[:end]), *words[end:])


_HEADER = struct.Struct(f"={len(Header._fields) - 1 + len(Label._fields)}q")
HEADER_SIZE = _HEADER.size  # bytes


class _Dense(NamedTuple):
    """A tensor whose values are sent as they lie in memory.

    Attributes:
        dtype: The type of its elements.
        size, stride: Of the tensor.
        stored: The size without the repetitions of an expanded tensor.
        requires_grad: Whether it does.
        on_device: Whether it goes to the device of its stage, rather than to the host.
        marks: The names of its marks.
    """

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    stored: tuple[int, ...]
    requires_grad: bool
    on_device: bool
    marks: tuple[str, ...]


class _Index(NamedTuple):
    """A leaf that is a tensor.

    Attributes:
        number: Its number among those that are sent, each once.
        alias: Which of several objects with that memory it is. Each has a gradient of its own, and
            the sum of these must be the same as without processes, to the bit.
    """

    number: int
    alias: int


class _Other(NamedTuple):
    """A tensor without dense memory of its own, such as a sparse one, in the body itself."""

    tensor: Tensor
    requires_grad: bool
    on_device: bool
    marks: tuple[str, ...]


# What a leaf may be that nobody can change.
_LASTING = frozenset({_Index, type(None), bool, int, float, complex, str, bytes, torch.dtype})


Way = Route | int | None  # a skip connection of the layout is a number: names differ by process


class Body(NamedTuple):
    """What a value is, but for the bytes of its tensors.

    Attributes:
        to: What needs it.
        way: The way on which it goes, if that is not to the next stage.
        leaves: The leaves of its tree, with the number of a tensor in the place of it.
        tensors: The tensors, each once.
        spec: The structure of the tree.
    """

    to: Action
    way: Way
    leaves: list[Any]
    tensors: list[_Dense | _Other]
    spec: Any

    def is_alike(self, other: Body) -> bool:
        """Whether another one is the same in a way that is quickly seen, as most are."""
        return (
            self.spec is other.spec
            and self.tensors == other.tensors
            and self.leaves == other.leaves
            and all(type(each) is _Index for each in self.leaves)
            and all(type(each) is _Dense for each in self.tensors)
        )

    @property
    def lasting(self) -> bool:
        """Whether nothing in it can be changed by who gets the value."""
        return all(type(each) in _LASTING for each in self.leaves) and all(
            type(each) is _Dense for each in self.tensors
        )


def pack(to: Action, way: Way, value: FlatTree) -> tuple[Body, list[Tensor]]:
    """The body of a value, and the bytes of its tensors.

    A tensor that is there twice stays one tensor, and two that are the same memory stay so. One
    that has no dense memory of its own, such as a sparse one, goes with the body.
    """
    numbers: dict[Hashable, int] = {}
    objects: dict[int, dict[int, int]] = {}  # of each number, by their ids
    tensors: list[_Dense | _Other] = []
    sent: list[Tensor] = []
    leaves: list[Any] = []
    for leaf in value.leaves:
        if not isinstance(leaf, Tensor):
            leaves.append(leaf)
            continue
        marks = tuple(mark for mark in MARKS if hasattr(leaf, mark))
        key = identity(leaf), marks
        if key not in numbers:
            numbers[key] = len(tensors)
            if _is_dense(leaf):
                described, content = _dense(leaf, marks)
                tensors.append(described)
                sent.append(content)
            else:
                tensors.append(_other(leaf, marks))
        same = objects.setdefault(numbers[key], {})
        leaves.append(_Index(numbers[key], same.setdefault(id(leaf), len(same))))
    return Body(to, way, leaves, tensors, value.spec), sent


def unpack(body: Body, fill: Callable[[Tensor], None]) -> tuple[FlatTree, list[bool]]:
    """The value, on the host.

    Args:
        body: What it is.
        fill: Receives the bytes of the next tensor.

    Returns:
        The value, and for each leaf whether it goes to the device of its stage.
    """
    values = [
        each.tensor if isinstance(each, _Other) else _filled(each, fill) for each in body.tensors
    ]
    objects: dict[_Index, Tensor] = {}
    leaves: list[Any] = []
    on_device: list[bool] = []
    for leaf in body.leaves:
        if not isinstance(leaf, _Index):
            leaves.append(leaf)
            on_device.append(False)
            continue
        described = body.tensors[leaf.number]
        if leaf not in objects:
            value = values[leaf.number]
            objects[leaf] = _described(value.detach() if leaf.alias else value, described)
        leaves.append(objects[leaf])
        on_device.append(described.on_device)
    return FlatTree(leaves, body.spec), on_device


def _described(tensor: Tensor, described: _Dense | _Other) -> Tensor:
    if described.requires_grad:
        tensor.requires_grad_()
    for mark in described.marks:
        setattr(tensor, mark, True)
    return tensor


def _filled(described: _Dense, fill: Callable[[Tensor], None]) -> Tensor:
    """A new tensor, with the values that come."""
    stored = torch.empty_strided(described.stored, described.stride, dtype=described.dtype)
    if stored.numel():
        fill(bytes_in(stored))
    return stored.expand(described.size) if described.stored != described.size else stored


def bytes_in(tensor: Tensor) -> Tensor:
    """The memory of a dense tensor as bytes, of shape ``(nbytes,)``."""
    flat = tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return flat.view(torch.uint8)


def _is_dense(tensor: Tensor) -> bool:
    """Whether a tensor has dense memory of its own."""
    plain = type(tensor) in (Tensor, torch.nn.Parameter) and not tensor.is_nested
    return plain and tensor.layout is torch.strided and not tensor.is_quantized


def _dense(tensor: Tensor, marks: tuple[str, ...]) -> tuple[_Dense, Tensor]:
    """What a tensor is, and its bytes on the host."""
    size, requires_grad = tuple(tensor.shape), tensor.requires_grad
    value = tensor.detach().resolve_conj().resolve_neg()
    for dim, stride in enumerate(value.stride()):
        if stride == 0 and value.shape[dim] > 1:
            value = value.narrow(dim, 0, 1)
    if not _fills_its_memory(value):
        value = value.contiguous()
    stored, order = tuple(value.shape), value.stride()
    on_device = tensor.device.type != "cpu"
    found = _Dense(tensor.dtype, size, order, stored, requires_grad, on_device, marks)
    return found, bytes_in(value.cpu() if on_device else value)


def _fills_its_memory(tensor: Tensor) -> bool:
    """Whether its elements lie side by side, each once, in any order of the dimensions."""
    if tensor.is_contiguous():
        return True
    dims = sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1)
    expected = accumulate((n for _, n in dims), int.__mul__, initial=1)
    return all(stride == each for (stride, _), each in zip(dims, expected, strict=False))


def _other(tensor: Tensor, marks: tuple[str, ...]) -> _Other:
    on_device = tensor.device.type != "cpu"
    value = tensor.detach()
    return _Other(value.cpu() if on_device else value, tensor.requires_grad, on_device, marks)
