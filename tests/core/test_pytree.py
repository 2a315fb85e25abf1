from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from lightning_gpipe.core.pytree import Flat, flatten, map_tensors, named_leaves, unflatten


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
    flat = flatten(tree)

    assert flat.leaves == leaves
    again = unflatten(flat)
    assert again == tree
    assert type(again) is type(tree)


def test_leaves_without_a_structure_make_no_tree() -> None:
    with pytest.raises(AssertionError, match="bare leaves"):
        unflatten(Flat([1, 2]))


def test_detached_tensors_are_leaves_that_require_what_they_did() -> None:
    x = torch.ones(2, requires_grad=True)
    flat = flatten((x * 2, torch.ones(2), torch.tensor([1]), "name", x))

    detached = flat.detached()

    tensors = [leaf for leaf in detached.leaves if isinstance(leaf, Tensor)]
    assert all(tensor.is_leaf for tensor in tensors)
    assert [tensor.requires_grad for tensor in tensors] == [True, False, False, True]
    assert detached.leaves[3] == "name"
    assert detached.leaves[4] is not x
    assert detached.spec == flat.spec


def test_detached_tensors_share_their_memory() -> None:
    x = torch.ones(2)

    assert flatten(x).detached().leaves[0].data_ptr() == x.data_ptr()


def test_only_tensors_are_mapped() -> None:
    tree = {"x": torch.ones(2), "name": "x", "n": [3, torch.zeros(())]}

    mapped = map_tensors(lambda tensor: tuple(tensor.shape), tree)

    assert mapped == {"x": (2,), "name": "x", "n": [3, ()]}


def test_leaves_are_named_by_their_path() -> None:
    tree = {"mask": [1, 2], "x": (3,)}

    assert named_leaves(tree) == [("['mask'][0]", 1), ("['mask'][1]", 2), ("['x'][0]", 3)]


def test_lone_leaf_has_no_path() -> None:
    assert named_leaves(5) == [("", 5)]
