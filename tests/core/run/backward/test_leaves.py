import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe.core.faithful.journal import Journal
from lightning_gpipe.core.faithful.shadow import Shadows
from lightning_gpipe.core.run.backward.leaves import UsedLeaves


def run(layer: nn.Module, *used: nn.Module) -> list[str]:
    """The names of the parameters of ``layer`` that took part when only ``used`` ran."""
    shadows = Shadows(layer.modules(), grad=True, device=torch.device("cpu"))
    used_leaves = UsedLeaves([shadows])
    with shadows.swapped_in(Journal()):
        outputs: list[Tensor] = [module(torch.ones(1, 2)) for module in used]
    used_leaves.record([*outputs, "not a tensor", torch.ones(1)], [], captures=False)
    found = {id(parameter) for parameter in used_leaves.leaves()}
    return [name for name, parameter in layer.named_parameters() if id(parameter) in found]


def two() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def test_all_parameters_where_nobody_has_a_hook() -> None:
    layers = two()

    assert run(layers, layers[0]) == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_only_those_in_a_graph_where_somebody_has_a_hook() -> None:
    layers = two()
    layers.get_parameter("1.weight").register_post_accumulate_grad_hook(lambda parameter: None)

    assert run(layers, layers[0]) == ["0.weight", "0.bias"]
    assert run(layers, layers[0], layers[1]) == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_shared_parameter_is_there_once() -> None:
    layers = two()
    layers[1].weight = layers[0].weight
    one, other = (
        Shadows(layer.modules(), grad=True, device=torch.device("cpu")) for layer in layers
    )

    assert len(UsedLeaves([one, other]).leaves()) == 3


@pytest.mark.parametrize("searched", [True, False])
def test_leaf_that_is_neither_a_parameter_nor_an_input_is_captured(searched: bool) -> None:
    layer, (code, x) = nn.Linear(2, 2), torch.ones(2, 1, 2, requires_grad=True).unbind()
    code, x = code.detach().requires_grad_(), x.detach().requires_grad_()
    shadows = Shadows(layer.modules(), grad=True, device=torch.device("cpu"))
    used_leaves = UsedLeaves([shadows])
    with shadows.swapped_in(Journal()):
        y = layer(x * code)

    found = used_leaves.record([y], [x], captures=searched)

    assert [leaf is code for leaf in found] == [True] * searched
    assert used_leaves.captured(code) == searched
    assert used_leaves.foreign(code)
    assert not used_leaves.foreign(layer.weight)
    assert len(used_leaves.leaves()) == 2 + searched
