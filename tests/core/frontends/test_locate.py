import pytest
from torch import Tensor, nn

from lightning_gpipe.core.frontends.locate import heaviest, locate


def layers(count: int, width: int = 2) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))


class Model(nn.Module):
    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


class Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def test_the_only_sequential() -> None:
    model = Model(loss=nn.MSELoss(), body=layers(3))

    assert locate(model, None) == ("body", model.body)


def test_sequential_deeper_down() -> None:
    model = Model(net=Model(layers=layers(3)), head=nn.Linear(2, 2))

    assert locate(model, None) == ("net.layers", model.get_submodule("net.layers"))


def test_module_that_is_a_sequential() -> None:
    module = layers(3)

    assert locate(module, None) == ("", module)


def test_sequential_within_a_sequential_is_no_candidate() -> None:
    model = Model(body=nn.Sequential(layers(3), layers(3)))

    assert locate(model, None)[0] == "body"


def test_sequential_with_a_forward_of_its_own_is_no_candidate() -> None:
    model = Model(block=Residual(*layers(5)), body=layers(2))

    assert locate(model, None)[0] == "body"


def test_sequential_with_most_of_the_parameters() -> None:
    model = Model(head=layers(1), body=layers(3), tail=layers(1))

    assert locate(model, None)[0] == "body"


def test_no_sequential() -> None:
    with pytest.raises(ValueError, match=r"Model must hold an nn.Sequential .* got none"):
        locate(Model(net=nn.Linear(2, 2)), None)


@pytest.mark.parametrize(
    "model",
    [
        Model(one=layers(2), two=layers(3, width=1), three=layers(2)),
        Model(one=layers(2), two=layers(2)),
    ],
    ids=["three", "half each"],
)
def test_none_with_more_than_half_of_the_parameters(model: Model) -> None:
    with pytest.raises(ValueError, match="the module to pipeline must be unambiguous") as error:
        locate(model, None)

    assert f"got {len(list(model.children()))} in Model" in str(error.value)
    assert "module='one': Sequential of 2, 12 parameters" in str(error.value)
    assert "module='two'" in str(error.value)


def test_sequential_that_the_user_named() -> None:
    model = Model(one=layers(2), two=layers(9))

    assert locate(model, "one") == ("one", model.one)


def test_sequential_within_a_sequential_that_the_user_named() -> None:
    model = Model(body=nn.Sequential(layers(3), layers(1)))

    assert locate(model, "body.0") == ("body.0", model.get_submodule("body.0"))


def test_name_of_nothing() -> None:
    with pytest.raises(ValueError, match="got 'net.body', where there is none") as error:
        locate(Model(one=layers(2), two=layers(2)), "net.body")

    assert "It holds 'one', 'two'." in str(error.value)


def test_name_of_nothing_in_a_model_without_a_sequential() -> None:
    with pytest.raises(ValueError, match="It holds no nn.Sequential and no nn.ModuleList."):
        locate(Model(net=nn.Linear(2, 2)), "body")


def test_name_of_something_else() -> None:
    model = Model(net=nn.Linear(2, 2), body=layers(9))

    assert locate(model, "net") == ("net", model.net)


def test_module_list_with_most_of_the_parameters() -> None:
    model = Model(head=layers(1), blocks=nn.ModuleList(layers(3)))

    assert locate(model, None) == ("blocks", model.blocks)
    assert heaviest(model) == ("blocks", model.blocks)


def test_module_list_beside_the_only_sequential() -> None:
    """The Sequential was taken before ModuleLists were, and still is."""
    losses, heads = nn.ModuleList([nn.MSELoss()]), nn.ModuleList(layers(2))
    model = Model(body=layers(2), losses=losses, heads=heads)

    assert locate(model, None)[0] == "body"
    assert heaviest(model) is None


def test_module_lists_alone_without_one_that_has_most_of_the_parameters() -> None:
    model = Model(one=nn.ModuleList(layers(2)), two=nn.ModuleList(layers(2)))

    with pytest.raises(ValueError, match="module='two': ModuleList of 2, 12 parameters"):
        locate(model, None)


def test_name_of_a_sequential_with_a_forward_of_its_own() -> None:
    with pytest.raises(TypeError, match="module='net' must have the forward .* got Residual"):
        locate(Model(net=Residual(*layers(2))), "net")


def test_sequential_in_a_module_list() -> None:
    model = Model(towers=nn.ModuleList([layers(4)]), head=layers(1))

    assert locate(model, None)[0] == "towers.0"
