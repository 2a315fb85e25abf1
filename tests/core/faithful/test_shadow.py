import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_map

from lightning_gpipe.core.faithful.journal import Journal
from lightning_gpipe.core.faithful.shadow import Shadows
from tests.support.quantised import Composed

CPU = torch.device("cpu")


def linear() -> nn.Linear:
    return nn.Linear(2, 3)


def shadows_of(*modules: nn.Module, grad: bool = True) -> Shadows:
    every = [each for module in modules for each in module.modules()]
    return Shadows(every, grad=grad, device=CPU)


def gradient_of(shadows: Shadows, layer: nn.Module) -> Tensor | None:
    weight = layer.get_parameter("weight")
    return next((g for parameter, g in shadows.take_gradients() if parameter is weight), None)


def test_shadows_are_swapped_in_and_out() -> None:
    layer = linear()
    weight, bias = layer.weight, layer.bias
    shadows = shadows_of(layer)

    with shadows.swapped_in(Journal()):
        inside = layer.weight

    assert inside is not weight
    assert inside.data_ptr() == weight.data_ptr()
    assert layer.weight is weight
    assert layer.bias is bias


class Marked(nn.Parameter):
    """A parameter of the user's own kind."""


class Doubling(nn.Parameter):
    """A parameter whose class changes what operators do."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            return 2 * result if func is nn.functional.linear else result


class Wrapped(nn.Parameter):
    """A parameter made of another tensor, as quantised weights are."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> "Wrapped":
        made: Wrapped = Tensor._make_wrapper_subclass(
            cls, held.shape, dtype=held.dtype, requires_grad=True
        )
        made.held = held
        return made

    def __init__(self, held: Tensor) -> None:
        pass

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it without @classmethod
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map(lambda x: x.held if isinstance(x, Wrapped) else x, (args, kwargs))
        result = func(*args, **(kwargs or {}))
        stays = func in (torch.ops.aten.detach.default, torch.ops.aten._to_copy.default)
        return Wrapped(result) if stays else result


KINDS: dict[str, Callable[[Tensor], nn.Parameter]] = {
    "plain": nn.Parameter,
    "a subclass": Marked,
    "a subclass with operators of its own": Doubling,
    "a subclass made of another tensor": Wrapped,
    "a tensor subclass": lambda value: nn.Parameter(TwoTensor(value, value.clone())),
}


@pytest.fixture(params=KINDS)
def layer(request: pytest.FixtureRequest) -> nn.Linear:
    """A layer with a weight of some kind, which has an attribute."""
    layer = linear()
    layer.weight = KINDS[request.param](layer.weight.detach())
    vars(layer.weight)["scale"] = 3
    return layer


@pytest.fixture(params=["at home", "elsewhere"])
def shadows(request: pytest.FixtureRequest, layer: nn.Linear) -> Shadows:
    followed = {(layer, "weight")} if request.param == "elsewhere" else ()
    return Shadows([layer], grad=True, device=CPU, followed=followed)


def test_shadow_is_of_the_parameters_class_with_its_attributes(
    layer: nn.Linear, shadows: Shadows
) -> None:
    """Once every shadow was a plain nn.Parameter without any."""
    weight = layer.weight

    with shadows.swapped_in(Journal()):
        inside = layer.weight

    assert inside is not weight
    assert type(inside) is type(weight)
    assert isinstance(inside, nn.Parameter)
    assert inside.requires_grad
    assert inside.is_leaf
    assert vars(inside)["scale"] == 3


def test_layer_computes_with_a_shadow_as_with_its_parameter(
    layer: nn.Linear, shadows: Shadows
) -> None:
    x = torch.ones(1, 2)
    layer(x).sum().backward()
    expected, layer.weight.grad = layer.weight.grad, None

    with shadows.swapped_in(Journal()):
        layer(x).sum().backward()

    gradient = gradient_of(shadows, layer)
    assert expected is not None
    assert gradient is not None
    assert type(gradient) is type(expected)
    assert repr(gradient) == repr(expected)
    assert layer.weight.grad is None


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_layer_writes_on_a_parameter_stays(kind: str) -> None:
    layer = linear()
    layer.weight = KINDS[kind](layer.weight.detach())

    with shadows_of(layer).swapped_in(Journal()):
        vars(layer.weight)["calls"] = 1

    assert vars(layer.weight)["calls"] == 1


def test_attributes_stay_when_shadows_are_gone() -> None:
    layer = linear()
    vars(layer.weight)["scale"] = torch.ones(1)

    for _ in range(3):
        shadows_of(layer)
        gc.collect()

    assert torch.equal(vars(layer.weight)["scale"], torch.ones(1))


def test_edit_of_a_parameter_of_another_kind_is_seen_in_its_graph(layer: nn.Linear) -> None:
    with shadows_of(layer).swapped_in(Journal()):
        y = (layer(torch.ones(1, 2, requires_grad=True)) * 1).exp()

    with torch.no_grad():
        layer.weight.add_(1)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_parameter_of_a_subclass_has_a_shadow() -> None:
    """Once its shadow was made from it, not from its value, which nn.Parameter refuses."""
    layer = linear()
    layer.weight = Marked(layer.weight.detach())

    with shadows_of(layer).swapped_in(Journal()):
        layer(torch.ones(1, 2)).sum().backward()
        gradient = layer.weight.grad

    assert gradient is not None
    assert type(layer.weight) is Marked
    assert layer.weight.grad is None


def test_shadows_are_swapped_out_after_an_error() -> None:
    layer = linear()
    weight = layer.weight

    with pytest.raises(KeyError), shadows_of(layer).swapped_in(Journal()):
        raise KeyError

    assert layer.weight is weight


def test_gradients_add_up_in_the_shadow_only() -> None:
    layer, x = linear(), torch.ones(1, 2)
    shadows = shadows_of(layer)

    for _ in range(2):
        with shadows.swapped_in(Journal()):
            y = layer(x)
        y.sum().backward()

    assert layer.weight.grad is None
    gradient = gradient_of(shadows, layer)
    assert gradient is not None
    assert torch.equal(gradient, torch.full((3, 2), 2.0))


def test_gradient_is_given_away_once() -> None:
    layer = linear()
    shadows = shadows_of(layer)
    with shadows.swapped_in(Journal()):
        layer(torch.ones(1, 2)).sum().backward()
        memory = layer.weight.grad.data_ptr()  # type: ignore[union-attr]  # just computed

    gradient = gradient_of(shadows, layer)

    assert gradient is not None
    assert gradient.data_ptr() == memory
    assert gradient_of(shadows, layer) is None


def test_parameter_that_was_not_used_has_no_gradient() -> None:
    layer = linear()

    assert gradient_of(shadows_of(layer), layer) is None


def test_parameter_of_another_stage_has_no_gradient() -> None:
    assert gradient_of(shadows_of(linear()), linear()) is None


def test_frozen_parameter_has_no_shadow() -> None:
    layer = linear()
    layer.weight.requires_grad_(False)
    shadows = shadows_of(layer)

    with shadows.swapped_in(Journal()):
        inside = layer.weight

    assert inside is layer.weight
    assert [p is layer.bias for p in shadows.parameters] == [True]


def test_parameter_in_two_places_has_one_shadow() -> None:
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    two.weight = one.weight
    shadows = shadows_of(one, two)

    with shadows.swapped_in(Journal()):
        assert one.weight is two.weight
        (one(torch.ones(1, 2)) + two(torch.ones(1, 2))).sum().backward()

    gradient = gradient_of(shadows, one)
    assert gradient is not None
    assert torch.equal(gradient, torch.full((2, 2), 2.0))


def test_parameter_that_was_replaced_is_found() -> None:
    layer = linear()
    layer.weight = nn.Parameter(torch.ones(3, 2))

    assert any(p is layer.weight for p in shadows_of(layer).parameters)


def test_two_sets_of_shadows_keep_their_gradients_apart() -> None:
    layer = linear()
    first, second = shadows_of(layer), shadows_of(layer)

    with first.swapped_in(Journal()):
        layer(torch.ones(1, 2)).sum().backward()

    assert gradient_of(second, layer) is None
    assert gradient_of(first, layer) is not None


def test_edit_of_the_parameter_before_backward_is_seen() -> None:
    layer = nn.Sequential(linear(), nn.Linear(3, 1))
    with shadows_of(layer).swapped_in(Journal()):
        y = layer(torch.ones(1, 2))

    with torch.no_grad():
        layer.get_parameter("1.weight").add_(1)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_cast_puts_back_what_is_there_not_what_was_once() -> None:
    """Once backward put back the parameter that forward had seen: the replacement was lost."""
    layer = linear()
    shadows = shadows_of(layer)
    layer.weight = other = nn.Parameter(torch.ones(3, 2))

    with shadows.swapped_in(Journal()):
        pass

    assert layer.weight is other


def test_edit_of_a_parameter_is_seen() -> None:
    layer = linear()
    shadows = shadows_of(layer)
    assert not shadows.edited

    with torch.no_grad():
        layer.weight.mul_(2)

    assert shadows.edited


# Parameters that live elsewhere; on one device, so that a copy can be told from the parameter.


def following(*layers: nn.Linear, grad: bool = True) -> Shadows:
    places = {(layer, "weight") for layer in layers}
    return Shadows(layers, grad=grad, device=CPU, followed=places)


def test_copy_follows_the_parameter() -> None:
    layer = linear()
    seen = []

    for value in (1.0, 2.0):
        nn.init.constant_(layer.weight.data, value)  # as some optimizers do: it counts as no edit
        with following(layer).swapped_in(Journal()):
            seen.append(layer.weight.detach())

    assert [weight.unique().tolist() for weight in seen] == [[1.0], [2.0]]
    assert seen[0].data_ptr() != layer.weight.data_ptr()


def test_gradient_of_a_copy_is_the_parameters() -> None:
    layer = linear()
    shadows = following(layer)

    with shadows.swapped_in(Journal()):
        layer(torch.ones(1, 2)).sum().backward()

    gradient = gradient_of(shadows, layer)
    assert gradient is not None
    assert torch.equal(gradient, torch.ones(3, 2))
    assert layer.weight.grad is None


def test_copy_in_two_places_is_one() -> None:
    one, two = linear(), linear()
    two.weight = one.weight

    with following(one, two).swapped_in(Journal()):
        assert one.weight is two.weight


@pytest.mark.parametrize("grad", [True, False])
def test_frozen_parameter_that_lives_elsewhere_is_copied_too(grad: bool) -> None:
    layer = linear().requires_grad_(False)
    weight, bias = layer.weight, layer.bias

    with following(layer, grad=grad).swapped_in(Journal()):
        assert layer.weight is not weight
        assert not layer.weight.requires_grad
        assert layer.bias is bias


def test_without_gradients_nothing_else_has_a_shadow() -> None:
    layer = linear()
    weight = layer.weight

    with shadows_of(layer, grad=False).swapped_in(Journal()):
        assert layer.weight is weight


class Untouched(nn.Parameter):
    """A parameter whose class refuses to be copied to where it lives elsewhere."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in (Tensor.detach, Tensor.to), "the class's own operators are the layer's"
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def test_copy_is_not_made_by_operators_of_the_parameters_class() -> None:
    layer = linear()
    layer.weight = Untouched(layer.weight.detach())

    with following(layer).swapped_in(Journal()):
        assert type(layer.weight) is Untouched


@pytest.mark.parametrize("grad", [True, False])
def test_edit_of_a_copy_is_seen(grad: bool) -> None:
    layer = linear().requires_grad_(False)
    weight, shadows = layer.weight, following(layer, grad=grad)

    with shadows.swapped_in(Journal()):
        assert shadows.lost is None
        layer.weight.mul_(2)

    assert shadows.lost is weight


@pytest.mark.parametrize("how", ["set", "added", "removed", "in place"])
def test_edit_beside_the_values_of_a_copy_is_seen(how: str) -> None:
    """The copy has attributes of its own, so the parameter would not get what a layer writes."""
    layer = linear()
    value = Composed(torch.ones(3, 2), torch.ones(3, 1))
    weight = layer.weight = nn.Parameter(value, requires_grad=False)
    shadows = following(layer)

    with shadows.swapped_in(Journal()):
        assert shadows.lost is None
        inside: Any = layer.weight
        if how == "set":
            inside.scale = None
        elif how == "added":
            inside.cache = 3
        elif how == "removed":
            del inside.scale
        else:
            inside.scale.mul_(2)

    assert shadows.lost is weight


def test_edit_of_a_parameter_that_is_followed_is_seen() -> None:
    layer = linear()
    shadows = following(layer)

    with torch.no_grad():
        layer.weight.mul_(2)

    assert shadows.edited


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hook_that_is_registered_while_the_shadow_is_in_place(register: str) -> None:
    layer = linear()
    layer.weight.register_hook(lambda gradient: gradient)  # before: not meant
    shadows = shadows_of(layer)
    assert shadows.hooked is None

    with shadows.swapped_in(Journal()):
        getattr(layer.bias, register)(lambda _: None)

    assert shadows.hooked is layer.bias
