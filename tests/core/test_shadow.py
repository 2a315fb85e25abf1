import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe.core.shadow import Shadows, Slots


def linear() -> nn.Linear:
    return nn.Linear(2, 3)


def gradient_of(shadows: Shadows, layer: nn.Module) -> Tensor | None:
    return shadows.take_gradient(layer.get_parameter("weight"))


def test_cast_puts_shadows_in_the_places_and_takes_them_out() -> None:
    layer = linear()
    weight, bias = layer.weight, layer.bias
    shadows = Slots([layer]).shadows()

    with shadows.cast():
        inside = layer.weight

    assert inside is not weight
    assert inside.data_ptr() == weight.data_ptr()
    assert layer.weight is weight
    assert layer.bias is bias


def test_cast_takes_shadows_out_after_an_error() -> None:
    layer = linear()
    weight = layer.weight

    with pytest.raises(KeyError), Slots([layer]).shadows().cast():
        raise KeyError

    assert layer.weight is weight


def test_gradients_add_up_in_the_shadow_only() -> None:
    layer, x = linear(), torch.ones(1, 2)
    shadows = Slots([layer]).shadows()

    for _ in range(2):
        with shadows.cast():
            y = layer(x)
        y.sum().backward()

    assert layer.weight.grad is None
    gradient = gradient_of(shadows, layer)
    assert gradient is not None
    assert torch.equal(gradient, torch.full((3, 2), 2.0))


def test_gradient_is_given_away_once() -> None:
    layer = linear()
    shadows = Slots([layer]).shadows()
    with shadows.cast():
        layer(torch.ones(1, 2)).sum().backward()
        memory = layer.weight.grad.data_ptr()  # type: ignore[union-attr]  # just computed

    gradient = gradient_of(shadows, layer)

    assert gradient is not None
    assert gradient.data_ptr() == memory
    assert gradient_of(shadows, layer) is None


def test_parameter_that_was_not_used_has_no_gradient() -> None:
    layer = linear()

    assert gradient_of(Slots([layer]).shadows(), layer) is None


def test_parameter_of_another_stage_has_no_gradient() -> None:
    assert gradient_of(Slots([linear()]).shadows(), linear()) is None


def test_frozen_parameter_has_no_shadow() -> None:
    layer = linear()
    layer.weight.requires_grad_(False)
    shadows = Slots([layer]).shadows()

    with shadows.cast():
        inside = layer.weight

    assert inside is layer.weight
    assert [p is layer.bias for p in shadows.parameters] == [True]


def test_parameter_in_two_places_has_one_shadow() -> None:
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    two.weight = one.weight
    shadows = Slots([one, two]).shadows()

    with shadows.cast():
        assert one.weight is two.weight
        (one(torch.ones(1, 2)) + two(torch.ones(1, 2))).sum().backward()

    gradient = gradient_of(shadows, one)
    assert gradient is not None
    assert torch.equal(gradient, torch.full((2, 2), 2.0))


def test_parameter_that_was_replaced_is_found() -> None:
    layer = linear()
    slots = Slots([layer])
    layer.weight = nn.Parameter(torch.ones(3, 2))

    assert any(p is layer.weight for p in slots.shadows().parameters)


def test_two_sets_of_shadows_keep_their_gradients_apart() -> None:
    layer = linear()
    slots = Slots([layer])
    first, second = slots.shadows(), slots.shadows()

    with first.cast():
        layer(torch.ones(1, 2)).sum().backward()

    assert gradient_of(second, layer) is None
    assert gradient_of(first, layer) is not None


def test_edit_of_the_parameter_before_backward_is_seen() -> None:
    layer = nn.Sequential(linear(), nn.Linear(3, 1))
    with Slots([layer]).shadows().cast():
        y = layer(torch.ones(1, 2))

    with torch.no_grad():
        layer.get_parameter("1.weight").add_(1)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_cast_puts_back_what_is_there_not_what_was_once() -> None:
    """0.1: a parameter replaced after forward was lost to the one that forward had seen."""
    layer = linear()
    shadows = Slots([layer]).shadows()
    layer.weight = other = nn.Parameter(torch.ones(3, 2))

    with shadows.cast():
        pass

    assert layer.weight is other


def test_edit_of_a_parameter_is_seen() -> None:
    layer = linear()
    shadows = Slots([layer]).shadows()
    assert not shadows.edited

    with torch.no_grad():
        layer.weight.mul_(2)

    assert shadows.edited
