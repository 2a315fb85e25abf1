"""One micro-batch on one stage: what it receives, keeps, and hands on.

Here are also the tests of ``activations`` and ``stage_borders``.
"""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe.core.data.marks import whole
from lightning_gpipe.core.data.pytree import FlatTree, tree_flatten
from lightning_gpipe.core.run.stage_pass import in_layers
from tests.support.stages import ALL, NONE, Pair, begin, stage

X = torch.tensor([[1.0, -2.0]])


class Double(nn.Module):
    """Counts its calls, and remembers its last output weakly."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.last: weakref.ref[Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = 2 * x
        self.last = weakref.ref(y)
        return y


class Edit(nn.Module):
    """Edits its input in place from the call on that is given."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first = first
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x.mul_(3) if self.calls >= self.first else x * 3


def leaf(x: Any = X) -> Tensor:
    return x.clone().requires_grad_()


def test_output_is_detached_and_knows_whether_it_requires_a_gradient() -> None:
    (y,) = begin(stage(nn.Linear(2, 2))).forward(0, tree_flatten(X)).leaves

    assert y.is_leaf
    assert y.requires_grad


@pytest.mark.parametrize("recomputed", [NONE, ALL], ids=["kept", "recomputed"])
def test_backward_gives_the_gradient_of_the_input(recomputed: frozenset[int]) -> None:
    run = begin(stage(Double(), nn.Tanh()), recomputed)
    x = leaf()
    run.forward(0, tree_flatten(x))
    if recomputed:
        run.recompute(0)

    (gradient,) = run.backward(0, FlatTree([torch.ones(1, 2)])).leaves

    assert gradient is not None
    torch.testing.assert_close(gradient, 2 * (1 - torch.tanh(2 * X) ** 2))


class Constant(nn.Module):
    """Returns its weight, whatever it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 2))

    def forward(self, x: Any) -> Tensor:
        return self.weight * 2


@pytest.mark.parametrize("value", [3, None, "name"])
@pytest.mark.parametrize("recomputed", [NONE, ALL], ids=["kept", "recomputed"])
def test_backward_of_an_input_that_is_no_tensor(value: Any, recomputed: frozenset[int]) -> None:
    """Once a sole input was taken to be a tensor, and backward raised AttributeError."""
    run = begin(stage(Constant()), recomputed)
    run.forward(0, tree_flatten(value))
    if recomputed:
        run.recompute(0)

    assert run.backward(0, FlatTree([torch.ones(1, 2)])).leaves == [None]
    assert [torch.equal(g, 2 * torch.ones(1, 2)) for _, g in run.shadows.take_gradients()] == [True]


def test_dropped_activations_are_freed_after_forward() -> None:
    double = Double()
    run = begin(stage(double, nn.Tanh(), nn.Tanh()), recomputed=ALL)

    run.forward(0, tree_flatten(leaf()))

    assert double.last is not None
    assert double.last() is None


def test_kept_activations_are_freed_after_backward() -> None:
    sigmoid, double = nn.Sigmoid(), Double()
    run = begin(stage(sigmoid, double, nn.Tanh()))
    run.forward(0, tree_flatten(leaf()))

    gc.disable()
    try:
        run.backward(0, FlatTree([torch.ones(1, 2)]))
        assert double.last is not None
        assert double.last() is None
    finally:
        gc.enable()


def test_input_is_freed_after_its_backward() -> None:
    run = begin(stage(nn.Tanh(), nn.Tanh()))
    run.forward(0, tree_flatten(leaf()))  # the first time, the layers work on a copy
    x = leaf()
    alive = weakref.ref(x)
    run.forward(1, tree_flatten(x))
    del x

    assert alive() is not None
    run.backward(1, FlatTree([torch.ones(1, 2)]))
    assert alive() is None


def test_frozen_stage_is_never_recomputed() -> None:
    double = Double()
    run = begin(stage(double), recomputed=ALL)

    run.forward(0, tree_flatten(X))
    run.recompute(0)

    assert run.backward(0, FlatTree([])).leaves == []
    assert double.calls == 1


def test_without_gradients_nothing_is_kept() -> None:
    with torch.no_grad():
        run = begin(stage(nn.Linear(2, 2)))
        (y,) = run.forward(0, tree_flatten(X)).leaves

    assert not y.requires_grad
    assert run.backward(0, FlatTree([torch.ones(1, 2)])).leaves == []


def test_output_that_nobody_used_has_no_gradient() -> None:
    run = begin(stage(Double()))
    run.forward(0, tree_flatten(leaf()))

    assert run.backward(0, FlatTree([None])).leaves == [None]


def test_release_lets_go() -> None:
    double = Double()
    run = begin(stage(double, nn.Tanh()))
    run.forward(0, tree_flatten(leaf()))

    run.release()

    assert double.last is not None
    assert double.last() is None


# Edits in place.


def test_edited_input_stays_as_it_was() -> None:
    x = leaf()
    editing = stage(Edit(first=1))

    for i in range(3):
        run = begin(editing)
        run.forward(i, tree_flatten(x))
        assert torch.equal(x, X)


@pytest.mark.parametrize("layer", [nn.ReLU(inplace=True), nn.ReLU()], ids=["edits", "does not"])
def test_gradient_through_an_edit(layer: nn.Module) -> None:
    editing = stage(layer)

    for _ in range(2):
        run = begin(editing)
        run.forward(0, tree_flatten(leaf()))
        (gradient,) = run.backward(0, FlatTree([torch.ones(1, 2)])).leaves
        assert gradient is not None
        assert gradient.tolist() == [[1.0, 0.0]]


def test_input_that_is_not_edited_is_copied_once() -> None:
    seen: list[int] = []
    watch = nn.Identity()
    watch.register_forward_hook(lambda module, args, output: seen.append(args[0].data_ptr()))
    watching = stage(watch)
    x = leaf()

    for _ in range(3):
        begin(watching).forward(0, tree_flatten(x))

    assert [pointer == x.data_ptr() for pointer in seen] == [False, True, True]


def test_tensor_given_whole_is_not_edited_without_gradients_either() -> None:
    table = whole(X.clone())
    editing = stage(Edit(first=1))

    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            for i in range(2):
                (y,) = begin(editing).forward(i, tree_flatten(table)).leaves
                assert torch.equal(y, 3 * X)

    assert torch.equal(table, X)


def test_layer_that_edits_in_training_only() -> None:
    dropout = nn.Dropout(0.5, inplace=True)
    editing = stage(dropout)
    dropout.eval()
    begin(editing).forward(0, tree_flatten(leaf()))
    dropout.train()

    begin(editing).forward(0, tree_flatten(leaf()))


def test_edit_that_first_appears_later() -> None:
    editing = stage(nn.Identity(), Edit(first=2), nn.ReLU())
    begin(editing).forward(0, tree_flatten(torch.ones(1, 2)))

    with pytest.raises(RuntimeError, match="always or never") as error:
        begin(editing).forward(0, tree_flatten(torch.ones(1, 2)))

    assert "layer 1 (Edit) must" in str(error.value)
    assert "it edited input 0 of its stage" in str(error.value)


def test_module_that_is_replaced_before_the_recomputation() -> None:
    outer = Pair(nn.Linear(2, 2), nn.Tanh())
    run = begin(stage(outer), recomputed=ALL)
    run.forward(0, tree_flatten(leaf()))
    run.check_unchanged()
    outer[1] = nn.ReLU()

    with pytest.raises(RuntimeError, match="modules must not be .* replaced between a forward"):
        run.check_unchanged()


class Search(nn.Module):
    """Asks whether it is in a layer: in all callers, and in those up to its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.found = [in_layers(), in_layers(outside=type(self).forward.__code__)]
        return x


def test_search_for_a_layer_ends_at_code_that_is_in_none() -> None:
    """A step logs several values; for each, all of the Trainer's frames were searched."""
    search = Search()
    begin(stage(search)).forward(0, tree_flatten(X))

    assert search.found == [True, False]
    assert not in_layers()
