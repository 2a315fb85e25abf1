"""Messages between processes: a header of a fixed size, and values or a text."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_gpipe.core.data import LEAF_SPEC, FlatTree
from lightning_gpipe.core.programs import Route
from lightning_gpipe.core.schedules import Action, Kind
from lightning_gpipe.core.transport.interface import Label
from lightning_gpipe.core.transport.process_group.wire.lone_tensor import (
    LoneTensor,
    split_lone_tensor,
)
from lightning_gpipe.core.transport.process_group.wire.tensor_bytes import (
    DenseForm,
    GpuPair,
    Receive,
    pack,
    tensor_of,
    unpack,
)


class MessageCode(IntEnum):
    """The kinds of messages."""

    VALUES = 1  # values that actions need
    FAILURE = 2  # a run has failed, and how
    CLOSED = 3  # one begins no exchange until others have closed too
    END = 4  # the sender sends nothing more
    ANSWER = 5  # an end was heard, by a process that goes on
    BEAT = 6  # a heartbeat, and what the sender does
    LOST = 7  # nothing works any more: a process is lost, or some wait for one another
    ENDED = 8  # one has ended that is connected with the sender
    CONNECT = 9  # one has values for another, and asks it to connect


ALL = -1  # all processes, see Header


class Header(NamedTuple):
    """The start of a message: a fixed number of integers."""

    code: int  # a MessageCode
    serial: int  # of the exchange, see Ledger; in END and ENDED, of the last one before the end
    label: Label = Label()  # of the exchange
    size: int = 0  # of what follows, in bytes
    bits: int = 0  # the signalled ones
    times: int = 0  # in CLOSED, END and ENDED, how often the process has closed or ended
    origin: int = 0  # the process that the message is of; others may pass it on
    to: int = ALL  # the process that it is for

    def encode(self) -> bytes:
        code, serial, label, *others = self
        return _HEADER.pack(code, serial, *label, *others)

    @classmethod
    def decode(cls, content: memoryview) -> Header:
        code, serial, *words = _HEADER.unpack_from(content)
        end = len(Label._fields)
        return cls(code, serial, Label(*words[:end]), *words[end:])


_HEADER = struct.Struct(f"={len(Header._fields) - 1 + len(Label._fields)}q")
HEADER_SIZE = _HEADER.size  # bytes


# A skip connection of the layout is a number, since names differ by process.
RouteId = Route | int | None


class Mail(NamedTuple):
    """A value from another process, or for one."""

    to: Action  # that needs it
    route: RouteId  # None to the next stage
    value: FlatTree  # on the host once it has come, or where its tensors came straight
    on_device: Sequence[bool] = ()  # of each leaf: a tensor for the stage's device
    gpus: GpuPair | None = None  # between which its tensors go straight; None if over the host
    ready: torch.cuda.Event | None = None  # after which tensors that came straight may be read

    def encode(self) -> tuple[bytes, list[Tensor]]:
        """Return the value without its dense tensors, and the bytes of these."""
        (kind, i, j), route, (leaves, spec), on_device, gpus, _ = self
        plain = (spec is LEAF_SPEC or spec is None) and not isinstance(route, Route)
        if plain and (lone := split_lone_tensor(leaves, self._numbers(), gpus)):
            body, content = lone
            return body, [content]
        # Names and numbers: to pickle objects of these classes would take three times as long.
        return pack((kind.name, i, j, route, leaves, spec, on_device), gpus)

    def announcement(self, form: DenseForm) -> bytes:
        """Return what :meth:`encode` returns without bytes, for one tensor that comes straight."""
        return LoneTensor(self._numbers(), False, form).encode()

    def _numbers(self) -> tuple[int, ...]:
        (kind, i, j), route, (_, spec), on_device, _, _ = self
        assert not isinstance(route, Route), "it has a number"
        number = _NO_ROUTE if route is None else route
        return _NUMBERS[kind], i, j, number, spec is LEAF_SPEC, *on_device

    @classmethod
    def decode(
        cls, body: bytes, fill: Callable[[Tensor], object], receive: Receive | None = None
    ) -> Mail:
        """Read a value; ``fill`` writes the bytes of its tensors, see :func:`tensor_of`."""
        if lone := LoneTensor.decode(body):
            number, i, j, route, is_leaf, *on_device = lone.numbers
            tensor = tensor_of(lone.form, fill, receive).requires_grad_(lone.requires_grad)
            value = FlatTree([tensor], LEAF_SPEC if is_leaf else None)
            to = Action(_KINDS[number], i, j)
            return cls(to, None if route == _NO_ROUTE else route, value, [*map(bool, on_device)])
        kind, i, j, route, leaves, spec, on_device = unpack(body, fill, receive)
        return cls(Action(Kind[kind], i, j), route, FlatTree(leaves, spec), on_device)


_NO_ROUTE = -1
_KINDS = tuple(Kind)
_NUMBERS = {kind: number for number, kind in enumerate(_KINDS)}
