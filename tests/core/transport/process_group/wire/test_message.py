"""Values as messages: what arrives is what was sent, however it lies in memory.

Here are also the tests of ``envelope`` and ``tensor_bytes``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_gpipe.core.data import LEAF_SPEC, is_whole, tree_flatten, tree_unflatten, whole
from lightning_gpipe.core.schedules import Action, Kind
from lightning_gpipe.core.transport.interface import Label
from lightning_gpipe.core.transport.process_group.wire.envelope import (
    LARGE,
    Envelope,
    Reader,
)
from lightning_gpipe.core.transport.process_group.wire.message import (
    HEADER_SIZE,
    Header,
    Mail,
    MessageCode,
)
from lightning_gpipe.core.transport.process_group.wire.tensor_bytes import pack
from tests.support.layouts import SPARSE, in_beta

TO = Action(Kind.FORWARD, 2, 1)


class Wire:
    """Both ends of a connection, without a network."""

    def __init__(self) -> None:
        self.apart = 0  # tensors that went by themselves

    def carry(self, value: Any) -> Any:
        """What arrives."""
        return self.carry_all([value])[0]

    def carry_all(self, values: list[Any]) -> list[Any]:
        """What arrives of several values in one message."""
        envelope = Envelope()
        for value in values:
            envelope.add(*Mail(TO, None, tree_flatten(value)).encode())
        message = memoryview(b"".join(envelope.seal(Header(MessageCode.VALUES, 1))))
        apart = [*envelope.large]
        self.apart += len(apart)

        def receive(room: memoryview) -> None:
            room[:] = apart.pop(0).numpy().data

        header, content = Header.decode(message), message[HEADER_SIZE:]
        assert header == Header(MessageCode.VALUES, 1, size=len(content))
        reader, found = Reader(content, receive), []
        for body in reader:
            mail = Mail.decode(body, reader.fill)
            assert mail.to == TO
            found.append(tree_unflatten(mail.value))
        assert not apart
        return found


def assert_arrives(tensor: Tensor) -> None:
    found = Wire().carry(tensor)

    assert found is not tensor
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    assert found.requires_grad == tensor.requires_grad
    assert is_whole(found) == is_whole(tensor)
    assert torch.equal(content(found), content(tensor))


def content(tensor: Tensor) -> Tensor:
    """The values as bytes, in order."""
    plain = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    return plain.clone(memory_format=torch.contiguous_format).view(torch.uint8)


DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.complex128,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (2, 3)], ids=str)
def test_every_type_and_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    assert_arrives(torch.randn(shape, dtype=torch.float64).mul(5).to(dtype))


@st.composite
def views(draw: st.DrawFn) -> Tensor:
    """Tensors that lie in memory in many ways."""
    sizes = draw(st.lists(st.integers(0, 3), max_size=4))
    x = torch.arange(1.0, 1 + torch.Size(sizes).numel()).reshape(sizes)
    for _ in range(draw(st.integers(0, 3))):
        if not x.dim():
            break
        dim = draw(st.integers(0, x.dim() - 1))
        kind = draw(st.sampled_from(["permuted", "step", "expanded", "narrowed", "flipped"]))
        if kind == "permuted":
            x = x.transpose(dim, draw(st.integers(0, x.dim() - 1)))
        elif kind == "step":
            x = x.movedim(dim, 0)[::2].movedim(0, dim)
        elif kind == "expanded":
            x = x.unsqueeze(dim).expand(*x.shape[:dim], draw(st.integers(1, 3)), *x.shape[dim:])
        elif kind == "narrowed" and x.size(dim):
            x = x.narrow(dim, 1, x.size(dim) - 1)
        else:
            x = x.flip(dim)
    if draw(st.booleans()):
        x = x.detach().requires_grad_()
    return whole(x.detach()) if draw(st.booleans()) else x


@given(x=views())
def test_every_view(x: Tensor) -> None:
    assert_arrives(x)


@given(x=views())
def test_what_fills_its_memory_keeps_its_strides(x: Tensor) -> None:
    dense = x.detach().clone(memory_format=torch.preserve_format)

    assert Wire().carry(dense).stride() == dense.stride()


def test_channels_last() -> None:
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)

    assert Wire().carry(x).is_contiguous(memory_format=torch.channels_last)


def test_expanded_tensor_is_sent_once() -> None:
    x = torch.randn(1, 3).expand(1000, 3)
    _, tensors = pack(x)

    assert sum(tensor.nbytes for tensor in tensors) == 12
    assert Wire().carry(x).stride() == (0, 1)


def test_conjugate_and_negative_views() -> None:
    x = torch.randn(3, dtype=torch.complex64)
    for view in (x.conj(), x.conj().imag):
        found = Wire().carry(view)
        assert torch.equal(found, view)


def test_tensor_that_is_there_twice_stays_one() -> None:
    x = torch.randn(3)
    a, (b, c), d = Wire().carry((x, [x, x.view_as(x)], x.clone()))

    assert a is b is not d
    assert a.data_ptr() == c.data_ptr() != d.data_ptr()


def test_marked_tensor_and_the_same_without_stay_two() -> None:
    x = torch.randn(3)
    a, b = Wire().carry((x, whole(x)))

    assert is_whole(b)
    assert not is_whole(a)


@in_beta
@pytest.mark.parametrize("convert", SPARSE.values(), ids=SPARSE)
def test_sparse_tensors(convert: Callable[[Tensor], Tensor]) -> None:
    wire, x = Wire(), whole(convert(torch.eye(4)))
    for _ in range(2):
        a, b = wire.carry((x, x))
        assert a is b
        assert is_whole(a)
        assert a.layout == x.layout
        assert torch.equal(a.to_dense(), torch.eye(4))
        a.values().zero_()  # as a layer may: the next one is not changed by it


def test_jagged_tensor() -> None:
    rows = [torch.randn(n, 2) for n in (3, 1, 2)]
    x = torch.nested.nested_tensor(rows, layout=torch.jagged)
    found = Wire().carry({"x": x, "k": 3})["x"]

    assert found.is_nested
    assert all(map(torch.equal, found.unbind(), rows))


class Named(Tensor):
    """A tensor of the user's class."""


def test_tensor_of_a_class_of_its_own() -> None:
    x = torch.randn(3).as_subclass(Named)
    found = Wire().carry(x)

    assert type(found) is Named
    assert torch.equal(found, x)


@dataclass(frozen=True)
class Task:
    """Something that PyTorch knows nothing of."""

    name: str


class Memo:
    """An object that layers may change."""

    def __init__(self) -> None:
        self.seen = 0


def test_other_values() -> None:
    value = {"a": [1, 2.5, None, "b", (True,)], "task": Task("c"), "d": torch.float16}

    assert Wire().carry(value) == value


def test_object_that_a_layer_changes_comes_unchanged_the_next_time() -> None:
    wire, memo = Wire(), Memo()
    for _ in range(2):
        found = wire.carry(memo)
        assert found.seen == 0
        found.seen = 1


@given(sizes=st.lists(st.integers(0, 3 * LARGE), max_size=6))
def test_values_in_one_message(sizes: list[int]) -> None:
    wire = Wire()
    values = [[torch.full((size,), k, dtype=torch.uint8), k] for k, size in enumerate(sizes)]

    assert_same_values(wire.carry_all(values), values)


def assert_same_values(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for (came, number), (sent, same) in zip(found, expected, strict=True):
        assert torch.equal(came, sent)
        assert number == same


def test_large_tensor_goes_by_itself() -> None:
    wire = Wire()
    assert_same(wire.carry(torch.ones(LARGE, dtype=torch.uint8)), torch.ones(LARGE))
    assert wire.apart == 0
    assert_same(wire.carry(torch.ones(LARGE + 1, dtype=torch.uint8)), torch.ones(LARGE + 1))
    assert wire.apart == 1


def test_message_of_much() -> None:
    wire = Wire()
    small = [torch.full((LARGE,), k, dtype=torch.uint8) for k in range(8)]
    found = wire.carry(["long" * LARGE, *small])

    assert found[0] == "long" * LARGE
    for k, each in enumerate(found[1:]):
        assert_same(each, torch.full((LARGE,), k))
    assert wire.apart == 0


def assert_same(found: Tensor, expected: Tensor) -> None:
    assert torch.equal(found, expected.to(found.dtype))


def test_value_whose_constants_are_equal_but_not_the_same() -> None:
    wire = Wire()
    for value in [1, True, 1.0, 0.0, -0.0]:
        found = wire.carry([torch.ones(1), value])[1]
        assert (type(found), str(found)) == (type(value), str(value))


def test_objects_with_the_same_memory() -> None:
    x = torch.ones(2, requires_grad=True)
    y = x.detach().requires_grad_()
    found = Wire().carry([x, y, x, x[:1].detach()])

    assert found[0] is found[2]
    assert found[0] is not found[1]
    assert found[0].data_ptr() == found[1].data_ptr() != found[3].data_ptr()
    assert [each.requires_grad for each in found] == [True, True, True, False]
    found[1].sum().backward()
    assert found[0].grad is None


def test_sparse_tensor_that_requires_a_gradient() -> None:
    found = Wire().carry(torch.eye(2).to_sparse().requires_grad_())

    assert found.requires_grad
    assert found.is_leaf


def test_tensor_with_requires_grad_and_structure_of_a_leaf() -> None:
    x = torch.ones(2, requires_grad=True)
    body, tensors = Mail(TO, None, tree_flatten(x), [True]).encode()

    def fill(room: Tensor) -> None:
        room.copy_(tensors[0])

    mail = Mail.decode(body, fill)
    assert mail.value.spec is LEAF_SPEC
    assert mail.value.leaves[0].requires_grad
    assert mail.on_device == [True]


def test_header() -> None:
    header = Header(
        MessageCode.VALUES, 1 << 40, Label(1, 2, 3, state=1 << 62), size=5, bits=6, times=4
    )
    content = header.encode()

    assert len(content) == HEADER_SIZE
    assert Header.decode(memoryview(content + b"more")) == header


def test_value_that_cannot_be_pickled_is_refused() -> None:
    with pytest.raises(TypeError, match="between processes must be tensors, plain values, "):
        Wire().carry([torch.ones(1), lambda: 1])
