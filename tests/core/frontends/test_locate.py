import pytest
from torch import nn

from lightning_gpipe.core.frontends.locate import heaviest, module_at
from tests.support.models import Model, Residual


def layers(count: int, width: int = 2) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))


def test_sequential_that_the_user_named() -> None:
    model = Model(one=layers(2), two=layers(9))

    assert module_at(model, "one") is model.one


def test_second_name_of_a_module() -> None:
    shared = layers(3)

    assert module_at(Model(body=shared, backbone=shared), "backbone") is shared


def test_sequential_within_a_sequential_that_the_user_named() -> None:
    model = Model(body=nn.Sequential(layers(3), layers(1)))

    assert module_at(model, "body.0") is model.get_submodule("body.0")


def test_name_of_nothing() -> None:
    with pytest.raises(ValueError, match="got 'net.body', where there is none") as error:
        module_at(Model(one=layers(2), two=layers(2)), "net.body")

    assert "It holds 'one', 'two'." in str(error.value)


def test_name_of_nothing_in_a_model_without_a_sequential() -> None:
    with pytest.raises(ValueError, match="It holds no nn.Sequential and no nn.ModuleList."):
        module_at(Model(net=nn.Linear(2, 2)), "body")


def test_name_of_something_else() -> None:
    model = Model(net=nn.Linear(2, 2), body=layers(9))

    assert module_at(model, "net") is model.net


def test_name_of_a_sequential_with_a_forward_of_its_own() -> None:
    with pytest.raises(TypeError, match="module='net' must have the forward.* got Residual"):
        module_at(Model(net=Residual(*layers(2))), "net")


def test_heaviest_of_several() -> None:
    model = Model(head=layers(1), body=layers(3), tail=layers(1))

    assert heaviest(model) == ("body", model.body)


def test_module_list_with_most_of_the_parameters() -> None:
    model = Model(head=layers(1), blocks=nn.ModuleList(layers(3)))

    assert heaviest(model) == ("blocks", model.blocks)


def test_sequential_with_a_forward_of_its_own_is_not_the_heaviest() -> None:
    model = Model(block=Residual(*layers(5)), body=layers(2))

    assert heaviest(model) is None
