"""Nested values are taken apart and put together; tensors hidden in objects are refused.

Here are also the tests of ``tensor_search``.
"""

from collections import OrderedDict
from dataclasses import InitVar, dataclass, field, fields
from types import SimpleNamespace
from typing import Any, Generic, NamedTuple, TypeVar

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe.core.data.pytree import (
    FlatTree,
    entries,
    map_instances,
    map_nodes,
    map_tensors,
    named_leaves,
    tree_flatten,
    tree_unflatten,
)
from tests.support.models import Interval

X = torch.tensor(2.0)

T = TypeVar("T")


class Pair(NamedTuple):
    x: Any
    y: Any


@pytest.mark.parametrize(
    "tree, leaves",
    [
        (1, [1]),
        ((1, [2, 3]), [1, 2, 3]),
        ({"a": 1, "b": (2, None)}, [1, 2, None]),
        (Pair(1, {"k": 2}), [1, 2]),
        (OrderedDict(b=1, a=2), [1, 2]),
        ((), []),
    ],
)
def test_tree_is_taken_apart_and_put_together(tree: Any, leaves: list[Any]) -> None:
    flat = tree_flatten(tree)

    assert flat.leaves == leaves
    again = tree_unflatten(flat)
    assert again == tree
    assert type(again) is type(tree)


def test_leaves_without_a_structure_make_no_tree() -> None:
    with pytest.raises(AssertionError, match="leaves without a structure"):
        tree_unflatten(FlatTree([1, 2]))


def test_detached_tensors_are_leaves_that_require_what_they_did() -> None:
    x = torch.ones(2, requires_grad=True)
    flat = tree_flatten((x * 2, torch.ones(2), torch.tensor([1]), "name", x))

    detached = flat.detached()

    tensors = [leaf for leaf in detached.leaves if isinstance(leaf, Tensor)]
    assert all(tensor.is_leaf for tensor in tensors)
    assert [tensor.requires_grad for tensor in tensors] == [True, False, False, True]
    assert detached.leaves[3] == "name"
    assert detached.leaves[4] is not x
    assert detached.spec == flat.spec


def test_detached_tensors_share_their_memory() -> None:
    x = torch.ones(2)

    assert tree_flatten(x).detached().leaves[0].data_ptr() == x.data_ptr()


def test_only_tensors_are_mapped() -> None:
    tree = {"x": torch.ones(2), "name": "x", "n": [3, torch.zeros(())]}

    mapped = map_tensors(lambda tensor: tuple(tensor.shape), tree)

    assert mapped == {"x": (2,), "name": "x", "n": [3, ()]}


def test_leaves_are_named_by_their_path() -> None:
    tree = {"mask": [1, 2], "x": (3,)}

    assert named_leaves(tree) == [("['mask'][0]", 1), ("['mask'][1]", 2), ("['x'][0]", 3)]


def test_lone_leaf_has_no_path() -> None:
    assert named_leaves(5) == [("", 5)]


def test_leaves_of_a_class_without_names_are_numbered() -> None:
    """A ValueError of PyTorch, as in verify() of a model that returns an output of diffusers."""
    tree = {"x": Interval(low=1, high=2)}

    assert named_leaves(tree) == [("['x'][0]", 1), ("['x'][1]", 2)]
    assert entries(tree["x"]) == [0, 1]
    assert map_nodes(lambda path, _: path, tree, lambda leaf: leaf == 2) == {
        "x": Interval(low=1, high="['x'][1]")
    }


@dataclass
class Sample:
    x: Any
    rest: Any = None


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Any
    length: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "length", len(self.x))


@pytest.mark.parametrize(
    "tree, leaves",
    [
        (Sample(X, "name"), [X, "name"]),
        ([Sample(X, {"y": Sample(X + 1, None)}), 3], [X, X + 1, None, 3]),
        (Frozen([X, X]), [X, X, 2]),
    ],
)
def test_dataclasses_are_taken_apart_and_put_together(tree: Any, leaves: list[Any]) -> None:
    flat = tree_flatten(tree)

    assert flat.leaves == leaves
    assert tree_unflatten(flat) == tree
    assert map_tensors(lambda x: x, tree) == tree


def test_structures_of_dataclasses_compare() -> None:
    assert tree_flatten(Sample(X)).spec == tree_flatten(Sample(X + 1)).spec
    assert tree_flatten(Sample(X)).spec != tree_flatten((X, None)).spec


def test_names_within_dataclasses() -> None:
    tree = {"a": Sample(1, (X,))}

    assert [name for name, _ in named_leaves(tree)] == ["['a'].x", "['a'].rest[0]"]
    assert entries(Sample(X, (X, X))) == ["x", "rest", "rest"]
    assert entries({"a": (1, 2), "b": 3}) == ["a", "a", "b"]
    assert entries((1, [2])) == [0, 1]
    assert entries(1) == [None]


def test_settings_without_tensors_stay_one_leaf() -> None:
    settings = Sample(3, "name")

    assert tree_flatten((X, settings)).leaves == [X, settings]


class Holder:
    def __init__(self, held: Any) -> None:
        self.held = held


class Slots:
    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held


class Bunch(dict[str, Any]):
    pass


@pytest.mark.parametrize(
    "leaf, found",
    [
        (Slots(X), "got a Slots with one in its attribute 'held'"),
        (SimpleNamespace(a={"k": [X]}), "got a SimpleNamespace with one in its attribute 'a'"),
        (Bunch(x=X), "got a Bunch that holds one. Convert it with dict"),
        ({"x": [Bunch(y={"z": X})]}, "got a Bunch that holds one"),
        ({X}, "got a set that holds one"),
        (Sample(1, Holder([X])), "got a Holder with one"),
    ],
)
def test_tensors_in_objects_of_other_kinds_are_refused(leaf: Any, found: str) -> None:
    """Once their gradients were lost, without an error, where there was one micro-batch."""
    with pytest.raises(TypeError) as error:
        tree_flatten(leaf)

    assert found in str(error.value)


@dataclass
class Scaled:
    x: Any

    def __post_init__(self) -> None:
        self.scale = 2.0


def test_attributes_of_a_dataclass_that_are_no_fields() -> None:
    again = tree_unflatten(tree_flatten(Scaled(X)))

    assert again == Scaled(X)
    assert again.scale == 2.0


@dataclass
class Output(OrderedDict[str, Any]):
    """As the outputs of models of Hugging Face: its fields are its items too, if they are set."""

    logits: Any = None
    hidden: Any = None

    def __post_init__(self) -> None:
        for each in fields(self):
            if getattr(self, each.name) is not None:
                super().__setitem__(each.name, getattr(self, each.name))

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self:
            super().__setitem__(name, value)
        super().__setattr__(name, value)


def test_dict_whose_items_are_fields() -> None:
    """Once an error about object.__new__."""
    output = Output(hidden=(X, X + 1))

    for again in (tree_unflatten(tree_flatten(output)), map_tensors(lambda x: x, output)):
        assert type(again) is Output
        assert again == output
        assert list(again) == ["hidden"]
        assert again.hidden is again["hidden"]
        assert again.logits is None
        again.hidden = X
        assert again["hidden"] is X
    assert entries(Output(X)) == ["logits", "hidden"]


def test_dict_with_other_items_than_fields_is_refused() -> None:
    output = Output(X)
    OrderedDict.__setitem__(output, "more", X)

    with pytest.raises(TypeError, match="got a Output that holds one. Convert it with dict"):
        tree_flatten({"output": output})


@dataclass(eq=False)
class Sequence(list[Any]):
    """A list with a field."""

    x: Any


def test_list_with_fields_is_refused() -> None:
    with pytest.raises(TypeError, match="got a Sequence that holds one"):
        tree_flatten(Sequence(X))


@dataclass
class Unset:
    x: Any
    later: Any = field(init=False)


@dataclass(slots=True)
class Base(Generic[T]):
    x: T


@dataclass(slots=True)
class Derived(Base[T]):
    y: Any = None


@dataclass(kw_only=True)
class InitOnly:
    x: Any
    scale: InitVar[float] = 2.0

    def __post_init__(self, scale: float) -> None:
        self.scaled = self.x * scale


@pytest.mark.parametrize(
    "tree, leaves",
    [
        (Unset(X), [X]),
        (Derived[Any](X, (X + 1,)), [X + 1, X]),
        (InitOnly(x=X), [X, X * 2]),
        ({"a": [Sample(Frozen([X]), {"b": Unset(X + 1)})]}, [X, 1, X + 1]),
    ],
)
def test_dataclasses_of_many_kinds(tree: Any, leaves: list[Any]) -> None:
    flat = tree_flatten(tree)

    assert flat.leaves == leaves
    again = tree_unflatten(flat)
    assert type(again) is type(tree)
    assert tree_flatten(again).leaves == leaves
    if isinstance(again, Unset):
        assert "later" not in vars(again)


def test_dataclass_without_tensors_is_left_alone() -> None:
    node = Sample(1)
    node.rest = node

    assert map_tensors(lambda x: x * 2, {"node": node, "x": X})["node"] is node


@pytest.mark.parametrize("held", [X, [X], {"x": X}], ids=["itself", "in a list", "in a dict"])
def test_tensors_in_other_objects_are_refused(held: Any) -> None:
    with pytest.raises(TypeError, match="got a Holder with one in its attribute 'held'"):
        tree_flatten((1, Holder(held)))


def test_distribution_is_refused() -> None:
    with pytest.raises(TypeError, match="got a Normal with one in its attribute"):
        tree_flatten(torch.distributions.Normal(torch.zeros(2), torch.ones(2)))


def test_packed_sequence_is_refused() -> None:
    packed = nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)])

    with pytest.raises(TypeError, match="a PackedSequence has no row per sample"):
        tree_flatten({"x": packed})


@pytest.mark.parametrize("leaf", [object(), Holder(3), int, nn.ReLU, "text", range(3)])
def test_other_values_are_leaves(leaf: Any) -> None:
    assert tree_flatten(leaf).leaves == [leaf]


class Unknown:
    """Stands for a value whose class is not known yet, as torch.fx has them."""

    @property  # type: ignore[misc]  # what is tested
    def __class__(self) -> Any:
        raise AssertionError("it was asked for its class")


def test_value_is_not_asked_for_its_class() -> None:
    assert map_instances(Unknown, lambda _: 1, [Unknown(), {"x": Unknown()}]) == [1, {"x": 1}]
