"""Messages between processes: a header, a body where it changed, and the bytes of tensors.

A header of a fixed size always goes first, because the receiver cannot know by itself what comes
next. The body describes the tensors and how they are nested. It is the same in most steps, so it is
sent when it differs from the one before in the same slot, and the receiver remembers it. See
:mod:`envelope <lightning_gpipe.core.transport.process_group.wire.envelope>` for how all of this is
put together.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Hashable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_gpipe.core.data import MARKS, FlatTree, identity
from lightning_gpipe.core.programs import Route
from lightning_gpipe.core.schedules import Action
from lightning_gpipe.core.transport.interface import Label
from lightning_gpipe.core.transport.process_group.wire.tensor_bytes import (
    DenseForm,
    form_and_bytes,
    is_dense,
    tensor_of,
)


class MessageCode(IntEnum):
    """The kinds of messages."""

    VALUES = 1  # values that actions need
    FAILURE = 2  # a run has failed, and how
    CLOSED = 3  # the sender begins no exchange until others have closed too
    END = 4  # the sender sends nothing more
    ANSWER = 5  # an end was heard, by a process that goes on
    BEAT = 6  # a heartbeat, and what the sender does
    LOST = 7  # nothing works any more: a process is lost, or some wait for one another


class Header(NamedTuple):
    """The start of a message: a fixed number of integers."""

    code: int  # a MessageCode
    serial: int  # of the exchange, see Ledger
    label: Label = Label()  # of the exchange
    size: int = 0  # of what follows, in bytes
    bits: int = 0  # the signalled ones; in CLOSED and END, 1 if another process closed before
    closed: int = 0  # in CLOSED and END, how often the sender has closed

    def encode(self) -> bytes:
        """Return the header as bytes."""
        code, serial, label, *others = self
        return _HEADER.pack(code, serial, *label, *others)

    @classmethod
    def decode(cls, content: memoryview) -> Header:
        """Read a header from the start of ``content``."""
        code, serial, *words = _HEADER.unpack_from(content)
        end = len(Label._fields)
        return cls(code, serial, Label(*words[:end]), *words[end:])


_HEADER = struct.Struct(f"={len(Header._fields) - 1 + len(Label._fields)}q")
HEADER_SIZE = _HEADER.size  # bytes


class _Index(NamedTuple):
    """A leaf that is a tensor, among those that are sent, and among objects with its memory.

    Each object has a gradient of its own, and the sum of these must be the same as without
    processes, to the bit.
    """

    number: int
    alias: int


class _Pickled(NamedTuple):
    """A tensor without dense memory of its own, such as a sparse one, in the body itself."""

    tensor: Tensor
    requires_grad: bool
    on_device: bool
    marks: tuple[str, ...]


# The types of leaves that nobody can change.
_IMMUTABLE = frozenset({_Index, type(None), bool, int, float, complex, str, bytes, torch.dtype})


# A skip connection of the layout is a number, since names differ by process.
RouteId = Route | int | None


class Mail(NamedTuple):
    """A value from another process, or for one.

    Attributes:
        to: The action that needs it.
        route: The route by which it goes; None to the next stage.
        value: The value; on the host, once it has come.
        on_device: For each leaf that has come, True if it goes to the device of the stage.
    """

    to: Action
    route: RouteId
    value: FlatTree
    on_device: Sequence[bool] = ()


class Body(NamedTuple):
    """A value without the bytes of its tensors.

    Attributes:
        leaves: The leaves of its tree, with an :class:`_Index` in the place of a tensor.
        tensors: The tensors, each once.
        spec: The structure of the tree.
    """

    to: Action
    route: RouteId
    leaves: list[Any]
    tensors: list[DenseForm | _Pickled]
    spec: Any

    def is_alike(self, other: Body) -> bool:
        """Return True if ``other`` is the same by a quick comparison, as most bodies are."""
        return (
            self.spec is other.spec
            and self.tensors == other.tensors
            and self.leaves == other.leaves
            and all(type(leaf) is _Index for leaf in self.leaves)
            and all(type(tensor) is DenseForm for tensor in self.tensors)
        )

    @property
    def immutable(self) -> bool:
        """True if the receiver of the value can change nothing in the body."""
        return all(type(leaf) in _IMMUTABLE for leaf in self.leaves) and all(
            type(tensor) is DenseForm for tensor in self.tensors
        )


def pack(mail: Mail) -> tuple[Body, list[Tensor]]:
    """Return the body of a value, and the bytes of its tensors.

    A tensor that is there twice stays one tensor, and two with the same memory keep sharing it. A
    tensor that has no dense memory of its own, such as a sparse one, goes with the body.
    """
    numbers: dict[Hashable, int] = {}
    objects: dict[int, dict[int, int]] = {}  # for each number the aliases, by the ids of objects
    tensors: list[DenseForm | _Pickled] = []
    contents: list[Tensor] = []
    leaves: list[Any] = []
    for leaf in mail.value.leaves:
        if not isinstance(leaf, Tensor):
            leaves.append(leaf)
            continue
        marks = tuple(mark for mark in MARKS if hasattr(leaf, mark))
        key = identity(leaf), marks
        if key not in numbers:
            numbers[key] = len(tensors)
            if is_dense(leaf):
                form, content = form_and_bytes(leaf, marks)
                tensors.append(form)
                contents.append(content)
            else:
                on_device, plain = leaf.device.type != "cpu", leaf.detach()
                plain = plain.cpu() if on_device else plain
                tensors.append(_Pickled(plain, leaf.requires_grad, on_device, marks))
        aliases = objects.setdefault(numbers[key], {})
        leaves.append(_Index(numbers[key], aliases.setdefault(id(leaf), len(aliases))))
    return Body(mail.to, mail.route, leaves, tensors, mail.value.spec), contents


def unpack(body: Body, fill: Callable[[Tensor], None]) -> Mail:
    """Return the value of a body, on the host.

    ``fill`` writes the bytes of the next tensor into its argument.
    """
    values = [
        described.tensor if isinstance(described, _Pickled) else tensor_of(described, fill)
        for described in body.tensors
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
            tensor = values[leaf.number]
            tensor = tensor.detach() if leaf.alias else tensor
            if described.requires_grad:
                tensor.requires_grad_()
            for mark in described.marks:
                setattr(tensor, mark, True)
            objects[leaf] = tensor
        leaves.append(objects[leaf])
        on_device.append(described.on_device)
    return Mail(body.to, body.route, FlatTree(leaves, body.spec), on_device)
