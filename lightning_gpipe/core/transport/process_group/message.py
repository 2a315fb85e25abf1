"""What one process sends to another: a header, a body where it changed, and the bytes of tensors.

A header of a fixed size always goes first, because the receiver cannot know by itself what comes
next. The body says what the tensors are and how they are nested. It is the same in most steps, so
it is sent when it differs from the one before, in the same slot, and remembered by the receiver.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Sequence
from enum import IntEnum
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_gpipe.core.data import LEAF_SPEC, MARKS, FlatTree
from lightning_gpipe.core.plan import Action, Route

_CAPACITY = 4096  # bodies that are remembered; beyond it, the least recently used is sent again


class Code(IntEnum):
    """What a header announces."""

    VALUE = 1  # what an action needs
    FAILURE = 2  # that a run failed, and how
    END = 3  # that nothing more comes


class Header(NamedTuple):
    """What is sent before anything else: twelve integers.

    Attributes:
        code: A :class:`Code`.
        serial: The number of the exchange.
        minibatch, phase, attempt, step, mode, state: Its label.
        slot: That of the body.
        size: The bytes of the body, or 0 if it is the one that was in the slot before.
        bits: Those that are signalled.
        version: That of this format.
    """

    code: int
    serial: int
    minibatch: int = 0
    phase: int = 0
    attempt: int = 0
    step: int = 0
    mode: int = 0
    state: int = 0
    slot: int = 0
    size: int = 0
    bits: int = 0
    version: int = 1

    def encoded(self) -> Tensor:
        """As bytes to send."""
        return torch.tensor(self, dtype=torch.int64)

    @classmethod
    def decoded(cls, words: Tensor) -> Header:
        """From the bytes that came."""
        return cls(*words.tolist())

    @classmethod
    def empty(cls) -> Tensor:
        """Room for the bytes of one."""
        return torch.empty(len(cls._fields), dtype=torch.int64)


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
    """A leaf that is a tensor: its number among those that are sent, each once."""

    number: int


class _Other(NamedTuple):
    """A tensor without dense memory of its own, such as a sparse one, in the body itself."""

    tensor: Tensor
    requires_grad: bool
    on_device: bool


class Body(NamedTuple):
    """What a value is, but for the bytes of its tensors.

    Attributes:
        to: What needs it.
        route: The way on which it goes, if that is not to the next stage.
        leaves: The leaves of its tree, with the number of a tensor in the place of it.
        tensors: The tensors, each once.
        spec: The structure of the tree.
    """

    to: Action
    route: Route | None
    leaves: list[Any]
    tensors: list[_Dense]
    spec: Any


def pack(to: Action, route: Route | None, value: FlatTree) -> tuple[Body, list[Tensor]]:
    """The body of a value, and the bytes of its tensors.

    A tensor that is there twice stays one tensor. One that has no dense memory of its own, such as
    a sparse one, goes with the body.
    """
    numbers: dict[int, int] = {}
    dense: list[_Dense] = []
    sent: list[Tensor] = []
    leaves: list[Any] = []
    for leaf in value.leaves:
        if not isinstance(leaf, Tensor):
            leaves.append(leaf)
            continue
        number = numbers.get(id(leaf))
        if number is None:
            found = _dense(leaf)
            if found is None:
                leaves.append(_other(leaf))
                continue
            number = numbers[id(leaf)] = len(dense)
            dense.append(found[0])
            sent.append(found[1])
        leaves.append(_Index(number))
    return Body(to, route, leaves, dense, value.spec), sent


def unpack(body: Body, fill: Callable[[Tensor], None]) -> tuple[FlatTree, list[bool]]:
    """The value, on the host.

    Args:
        body: What it is.
        fill: Receives the bytes of the next tensor.

    Returns:
        The value, and for each leaf whether it goes to the device of its stage.
    """
    tensors = []
    for each in body.tensors:
        stored = torch.empty_strided(each.stored, each.stride, dtype=each.dtype)
        if stored.numel():
            fill(bytes_in(stored))
        tensor = stored.expand(each.size) if each.stored != each.size else stored
        if each.requires_grad:
            tensor.requires_grad_()
        for mark in each.marks:
            setattr(tensor, mark, True)
        tensors.append(tensor)
    leaves: list[Any] = []
    on_device: list[bool] = []
    for leaf in body.leaves:
        if isinstance(leaf, _Index):
            leaves.append(tensors[leaf.number])
            on_device.append(body.tensors[leaf.number].on_device)
        elif isinstance(leaf, _Other):
            leaves.append(leaf.tensor.detach().requires_grad_(leaf.requires_grad))
            on_device.append(leaf.on_device)
        else:
            leaves.append(leaf)
            on_device.append(False)
    return FlatTree(leaves, body.spec), on_device


def bytes_in(tensor: Tensor) -> Tensor:
    """The memory of a dense tensor as bytes, of shape ``(nbytes,)``."""
    flat = tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return flat.view(torch.uint8)


class Sent:
    """The bodies that were sent to one process, by the slots in which it remembers them."""

    def __init__(self) -> None:
        self._slots: OrderedDict[tuple[Action, Route | None], tuple[int, bytes]] = OrderedDict()

    def slot_for(self, body: Body, encoded: bytes) -> tuple[int, bool]:
        """The slot of a body, and whether it must be sent because another one is there."""
        key = body.to, body.route
        before = self._slots.get(key)
        if before is not None:
            slot = before[0]
        elif len(self._slots) < _CAPACITY:
            slot = len(self._slots)
        else:
            _, (slot, _) = self._slots.popitem(last=False)
        self._slots[key] = slot, encoded
        self._slots.move_to_end(key)
        return slot, before is None or before[1] != encoded


class Coder:
    """Encodes bodies; those of all processes must be made with equal arguments.

    Args:
        routes: The skip connections. Their names differ between processes, so they are numbered.
    """

    def __init__(self, routes: Sequence[Route]) -> None:
        self._routes = list(routes)
        self._numbers = {route: number for number, route in enumerate(routes)}

    def encoded(self, body: Body) -> bytes:
        """The body as bytes.

        Raises:
            TypeError: If something in it cannot be pickled.
        """
        buffer = io.BytesIO()
        try:
            _Pickler(buffer, self._numbers).dump(tuple(body))
        except Exception as error:
            raise TypeError(
                "what travels between processes must be tensors and values that can be pickled: "
                f"{type(error).__name__}: {error}. Make it where it is needed instead, or run the "
                "stages between which it travels in one process."
            ) from error
        return buffer.getvalue()

    def decoded(self, encoded: bytes) -> Body:
        """The body."""
        return Body(*_Unpickler(io.BytesIO(encoded), self._routes).load())


class _Pickler(pickle.Pickler):
    """Names what must be the same object, or differs, in the other process."""

    def __init__(self, buffer: io.BytesIO, numbers: dict[Route, int]) -> None:
        super().__init__(buffer, protocol=pickle.HIGHEST_PROTOCOL)
        self._numbers = numbers

    def persistent_id(self, value: Any) -> Any:
        if value is LEAF_SPEC:
            return -1
        return self._numbers.get(value) if type(value) is Route else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, buffer: io.BytesIO, routes: list[Route]) -> None:
        super().__init__(buffer)
        self._routes = routes

    def persistent_load(self, number: Any) -> Any:
        return LEAF_SPEC if number < 0 else self._routes[number]


def _dense(tensor: Tensor) -> tuple[_Dense, Tensor] | None:
    """What a tensor is, and its bytes on the host; None if it has no dense memory of its own."""
    plain = type(tensor) in (Tensor, torch.nn.Parameter)
    if not plain or tensor.layout is not torch.strided or tensor.is_quantized:
        return None
    size, requires_grad = tuple(tensor.shape), tensor.requires_grad
    marks = tuple(mark for mark in MARKS if hasattr(tensor, mark))
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


def _other(tensor: Tensor) -> _Other:
    on_device = tensor.device.type != "cpu"
    value = tensor.detach()
    return _Other(value.cpu() if on_device else value, tensor.requires_grad, on_device)
