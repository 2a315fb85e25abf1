"""Trust: what another process sends runs nothing here, and most values need no ceremony."""

import io
import os
import pickle
from argparse import Namespace
from collections import Counter, OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import date, timedelta
from decimal import Decimal
from enum import Enum, Flag
from fractions import Fraction
from pathlib import Path
from subprocess import Popen
from types import SimpleNamespace
from typing import Any, NamedTuple
from uuid import UUID

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from lightning_gpipe.core.data import tree_flatten, tree_unflatten
from lightning_gpipe.core.transport.process_group.wire import plain_values
from lightning_gpipe.core.transport.process_group.wire.plain_values import (
    ClassName,
    PlainUnpickler,
)
from lightning_gpipe.core.transport.process_group.wire.tensor_bytes import pack, unpack

RAN: list[str] = []  # what code has run that must not


def carried(value: Any) -> Any:
    """What arrives of a value."""
    body, tensors = pack(value)
    waiting = [each.clone() for each in tensors if each.numel()]
    return unpack(body, lambda room: room.copy_(waiting.pop(0)))


@dataclass
class Task:
    """A dataclass, whose own code must not run when it arrives."""

    number: int
    names: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        RAN.append("post_init")


@dataclass(frozen=True, slots=True)
class Fixed:
    """A dataclass without a dictionary."""

    number: int
    x: Tensor = field(compare=False)


class Named(NamedTuple):
    """A named tuple."""

    a: int
    b: str


Plain = namedtuple("Plain", "a b")


class Data(UserDict[str, Any]):
    """A mapping with its own state, as BatchEncoding is."""


class Colour(Enum):
    """Some names."""

    RED = 1


class Bits(Flag):
    """Some bits."""

    ONE = 1
    TWO = 2


class Memo:
    """An object that has fields only."""

    def __init__(self) -> None:
        self.seen = 3

    def __eq__(self, other: object) -> bool:
        return vars(self) == vars(other)


class Items(dict[str, int]):
    """A dict of one's own."""


VALUES = [
    {"a": [1, 2.0, None, True, b"x", ..., 1j], "b": (1, {2}, frozenset({3}), range(4), slice(1))},
    [timedelta(seconds=3), Path("a/b"), Counter("aab"), deque([1], 3), OrderedDict(a=1)],
    [defaultdict(list, a=[1]), torch.float16, torch.device("cpu"), torch.Size([2, 3])],
    [np.float32(3.0), np.dtype("int16"), bytearray(b"x")],
    [Named(1, "b"), Plain(1, 2), Colour.RED, Bits.ONE | Bits.TWO, Namespace(a=1), Memo()],
    [Data(a=1), Items(a=1), UUID(int=3), Fraction(1, 3), Decimal("1.5"), date(2000, 1, 1)],
    [SimpleNamespace(a=1), {Named(1, "b"): Colour.RED}],
]


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_values_that_arrive_as_they_are(value: Any) -> None:
    found = carried(value)

    assert found == value
    assert repr(list(map(type, found))) == repr(list(map(type, value)))


def test_dataclasses_are_made_of_their_fields_alone() -> None:
    task, fixed = Task(3, ["a"]), Fixed(2, torch.ones(2))
    RAN.clear()
    found, other = carried([task, fixed])

    assert (found, other, RAN) == (task, fixed, [])
    assert torch.equal(other.x, fixed.x)


@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays(order: Any) -> None:
    x = np.arange(6.0).reshape(2, 3).copy(order=order)

    assert np.array_equal(carried(x), x)


def test_packed_sequence() -> None:
    packed = pack_sequence([torch.ones(3), torch.ones(2)])

    assert torch.equal(carried(packed).data, packed.data)


def test_tensor_without_values() -> None:
    x, y = torch.empty(2, 3, device="meta"), torch.empty(2, 3, device="meta")
    a, b, c = carried([x, y, x])

    assert a.is_meta
    assert a is c is not b


@pytest.mark.parametrize(
    "tree",
    [
        Plain(torch.ones(1), [torch.ones(2)]),
        defaultdict[str, Any](list, a=torch.ones(1)),
        deque([torch.ones(1)], maxlen=3),
        torch.ones(2, 2).max(0),
        Fixed(1, torch.ones(1)),
        [],
    ],
    ids=lambda each: type(each).__name__,
)
def test_structures(tree: Any) -> None:
    flat = tree_flatten(tree)
    found = carried(flat)

    assert found.spec == flat.spec
    assert type(tree_unflatten(found)) is type(tree)


def test_batches_and_outputs_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    batch = transformers.BatchEncoding({"x": torch.ones(2)})
    output = transformers.modeling_outputs.CausalLMOutput(logits=torch.ones(3))
    found, other = carried([batch, output])

    assert torch.equal(found["x"], batch["x"])
    assert torch.equal(found.to("cpu").x, batch.x)
    assert torch.equal(other.logits, output.logits)
    assert torch.equal(other["logits"], output[0])
    assert other.loss is None


class Calling:
    """Runs a command where it is unpickled."""

    def __reduce__(self) -> Any:
        return os.system, ("touch " + RAN[0],)


def global_of(module: str, name: str, *arguments: Any) -> bytes:
    """A pickle that calls what it names."""
    head = b"\x80\x04c" + f"{module}\n{name}\n".encode()
    return head + pickle.dumps(arguments, 0)[:-1] + b"R."


class Dying:
    """An object that does something when it is freed."""

    def __del__(self) -> None:
        RAN.append("del")


ATTACKS = {
    "system": global_of("os", "system", "touch ran"),
    "posix": global_of("posix", "system", "touch ran"),
    "eval": global_of("builtins", "eval", "RAN.append(1)"),
    "getattr": global_of("builtins", "getattr", "", "join"),
    "import": global_of("builtins", "__import__", "antigravity"),
    "part of a class": global_of("builtins", "dict.fromkeys", "a"),
    "torch": global_of("torch.storage", "_load_from_bytes", b""),
    "modules of a module": global_of("torch.return_types", "torch.os.system", "touch ran"),
    "own": global_of("lightning_gpipe.core.data.pytree", "spec_of", None, None, []),
    "dataclass that is called": global_of(__name__, "Task", 3),
    "named tuple that is called": global_of(__name__, "Plain", 3, 4),
}


@pytest.fixture(autouse=True)
def _nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    RAN[:] = [str(tmp_path / "ran")]
    yield
    assert not (tmp_path / "ran").exists()
    assert RAN[1:] == []


@pytest.mark.parametrize("content", ATTACKS.values(), ids=ATTACKS)
def test_pickle_that_calls_something(content: bytes) -> None:
    RAN[:] = [RAN[0]]
    for read in (lambda: PlainUnpickler(io.BytesIO(content)).load(), lambda: unpack(content, len)):
        with pytest.raises(pickle.PicklingError, match="is not among them"):
            read()


@pytest.mark.parametrize("name", ["_record", "_name", "collections Counter", "collections deque"])
def test_pickle_that_changes_what_it_may_call(name: str) -> None:
    """Once a state of slots set ``is_plain`` of the class by whose names classes are looked up."""
    module, _, name = name.rpartition(" ")
    head = b"\x80\x04c" + f"{module or plain_values.__name__}\n{name}\n".encode()
    content = head + b"N" + pickle.dumps({"is_plain": True}, 0)[:-1] + b"\x86b."

    with pytest.raises((AttributeError, TypeError)):
        PlainUnpickler(io.BytesIO(content)).load()


def test_pickle_within_a_value() -> None:
    for content in (pickle.dumps(Calling()), pickle.dumps([Calling()])):
        with pytest.raises(pickle.PicklingError, match="system is not among them"):
            unpack(pickle.dumps(([], content)), len)


def test_tensor_that_is_a_pickle() -> None:
    file = io.BytesIO()
    torch.save(Calling(), file)

    with pytest.raises(pickle.UnpicklingError, match="system"):
        unpack(pickle.dumps(([(None, file.getvalue())], b"")), len)


@pytest.mark.parametrize("cls", [Dying, Popen, torch.nn.Linear], ids=lambda each: each.__name__)
def test_record_of_a_class_that_is_more_than_its_fields(cls: type) -> None:
    with pytest.raises(pickle.PicklingError, match=f"{cls.__name__} is not among them"):
        plain_values._record(ClassName.of(cls))


def test_record_of_a_module_that_is_not_imported() -> None:
    with pytest.raises(pickle.PicklingError, match="antigravity.X is not known here"):
        plain_values._record(ClassName("antigravity", "X"))


@pytest.mark.parametrize("kind", ["namedtuple", Memo])
def test_structure_whose_nodes_are_calls(kind: Any) -> None:
    with pytest.raises(TypeError, match="nodes of a tree must be of registered classes"):
        plain_values._spec(kind, Memo, [])


class Special:
    """An object that is made by its own code."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        return Special, (self.number,)


def test_class_that_is_not_allowed_is_named_by_the_sender() -> None:
    with pytest.raises(TypeError) as error:
        pack({"x": torch.ones(1), "special": Special(3)})

    assert "values sent between processes must be tensors, plain values, dataclasses" in str(
        error.value
    )
    assert "test_plain_values.Special is not among them" in str(error.value)
    assert "write torch.serialization.add_safe_globals([Special]) in all" in str(error.value)


def test_class_that_the_user_allows() -> None:
    with torch.serialization.safe_globals([Special]):
        assert carried([Special(3)])[0].number == 3


def test_class_as_a_value_is_refused() -> None:
    with pytest.raises(TypeError, match="Memo is not among them"):
        pack({"kind": Memo})
