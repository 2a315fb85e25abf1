"""Without a name, what holds the work of each network is piped; other tests run Trainers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torchmetrics import MeanMetric

from lightning_gpipe import GPipeStrategy, Rows
from tests.support.lightning_examples import ImageNet
from tests.support.models import Model, Residual


def layers(count: int, width: int = 8) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))


class Chain(Model):
    """Calls its children one after another, and those of an nn.ModuleList too."""

    def forward(self, x: Tensor) -> Tensor:
        for child in self.children():
            for layer in child if isinstance(child, nn.ModuleList) else [child]:
                x = layer(x)
        return x


class Untraceable(Chain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() > 0 else x


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


def paths(model: nn.Module, **options: Any) -> list[str]:
    strategy = GPipeStrategy(**options)
    return [piped.path for piped in strategy.piped_modules(model)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "model, expected",
    [
        (Model(loss=nn.MSELoss(), body=layers(3)), ["body"]),
        (Model(net=Chain(layers=layers(3)), head=nn.Linear(8, 2)), ["net.layers"]),
        (Model(body=nn.Sequential(layers(3), layers(3))), ["body"]),
        (Model(body=nn.ModuleList(layers(3)), head=nn.Linear(8, 1)), ["body"]),
        (Model(net=Chain(towers=nn.ModuleList([layers(4)]))), ["net.towers.0"]),
        (Model(body=layers(3), head=weight_norm(nn.Linear(2, 8))), ["body"]),
        (Model(net=nn.ModuleDict({"a": layers(2), "b": layers(3)})), ["net.a", "net.b"]),
    ],
    ids=["loss", "within", "nested", "list", "in a list", "parametrized head", "dict"],
)
def test_container_with_the_work(model: nn.Module, expected: list[str]) -> None:
    assert paths(model) == expected


def test_lone_network_without_a_container_is_piped_whole() -> None:
    assert paths(Model(backbone=Chain(a=nn.Linear(8, 8), b=nn.Linear(8, 8)))) == ["backbone"]


def test_network_is_piped_whole_if_a_container_leaves_more_than_a_tenth_aside() -> None:
    """An embedding is looked up: it is no work, whatever its size."""
    large = nn.Embedding(1000, 8)

    assert paths(Model(net=Chain(e=large, body=layers(10), head=nn.Linear(8, 8)))) == ["net.body"]
    assert paths(Model(net=Chain(e=large, body=layers(8), head=nn.Linear(8, 8)))) == ["net"]


def test_convolution_beside_a_container_may_be_most_of_the_work() -> None:
    stem = nn.Conv2d(3, 4, 1)

    assert paths(Model(net=Chain(stem=stem, body=layers(20, 64)))) == ["net"]


def test_network_that_cannot_be_traced_is_piped_by_its_containers() -> None:
    net = Untraceable(a=nn.Linear(8, 8), body=layers(3))

    assert paths(Model(net=net)) == ["net.body"]


def test_outermost_of_containers_within_one_another_is_piped() -> None:
    net = Untraceable(a=nn.Linear(8, 8), body=nn.ModuleList([layers(2), layers(2)]))

    assert paths(Model(net=net)) == ["net.body"]


def test_network_within_one_that_cannot_be_traced_is_no_single_layer() -> None:
    """Its wrapper can be traced, with all of it as one layer."""
    net = Chain(inner=Untraceable(a=nn.Linear(8, 8), body=layers(3)), head=nn.Linear(8, 8))

    assert paths(Model(net=net)) == ["net.inner.body"]


def test_sequential_with_a_forward_of_its_own_is_piped_as_its_forward_is_traced() -> None:
    assert paths(Model(block=Residual(*layers(5)))) == ["block"]


def test_ways_to_cut_batches_are_for_sequentials() -> None:
    net = Chain(e=nn.Linear(8, 8), body=layers(4))

    assert paths(Model(net=net), microbatching=Rows()) == ["net.body"]


def test_several_networks() -> None:
    model = Model(one=layers(2), two=layers(3), head=nn.Linear(8, 1), metric=MeanMetric())

    assert paths(model) == ["one", "two"]


def test_network_with_little_work_is_left_aside() -> None:
    assert paths(Model(one=layers(30), two=layers(2))) == ["one"]


def test_small_network_with_convolutions_may_have_most_of_the_work() -> None:
    convolutions = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1))

    assert paths(Model(one=layers(30, 64), two=convolutions)) == ["one", "two"]


def test_frozen_network_is_work_too() -> None:
    """Once a frozen backbone was left aside, and its head refused for lack of layers."""
    assert paths(Model(backbone=frozen(layers(9)), head=nn.Linear(8, 2))) == ["backbone"]
    assert paths(Model(one=frozen(layers(9)), two=layers(3))) == ["one", "two"]


@pytest.mark.parametrize(
    "options", [{"schedule": "1f1b"}, {"chunks": "auto"}, {"schedule": "auto"}], ids=str
)
def test_one_of_several_networks_for_what_is_for_one_pipeline(options: Any) -> None:
    assert paths(Model(one=layers(2), two=layers(3)), **options) == ["two"]
    with pytest.raises(ValueError, match="the module to pipeline must be unambiguous"):
        paths(Model(one=layers(2), two=layers(2)), **options)


def test_balance_that_counts_or_names_layers() -> None:
    net = Chain(e=nn.Linear(8, 8), body=layers(4))
    model = Model(net=net, other=layers(3))

    assert paths(model) == ["net", "other"]
    assert paths(model, balance=[2, 2]) == ["net.body"]
    assert paths(model, balance=[1, 2]) == ["other"]
    assert paths(model, balance=["0", "3"]) == ["net.body"]
    assert paths(Model(net=net), balance=[2, 3]) == ["net"]


def test_balance_that_counts_the_layers_of_several() -> None:
    with pytest.raises(ValueError, match="must be unambiguous") as error:
        paths(Model(one=layers(2), two=layers(2)), balance=[1, 1])

    assert "module='one': Sequential of 2, 144 parameters" in str(error.value)
    assert "module='two'" in str(error.value)


def test_nothing_with_layers() -> None:
    with pytest.raises(ValueError, match=r"Model must hold layers to pipeline") as error:
        paths(Model(layer=nn.Linear(2, 2)))

    assert "move together with these calls into an nn.Module of their own" in str(error.value)


def test_plain_list_of_layers() -> None:
    """A list that is no nn.ModuleList was not mentioned, only the head beside it."""
    model = Model(head=nn.Linear(2, 2))
    model.layers = [nn.Linear(2, 2)]  # type: ignore[assignment]  # the mistake

    with pytest.raises(ValueError, match=r"layers: a plain list of modules.* Write nn\.ModuleList"):
        paths(model)


def test_nothing_with_half_of_the_work() -> None:
    net = Untraceable(a=nn.Linear(64, 64), body=layers(3))

    with pytest.raises(ValueError, match="hold most of the work") as error:
        paths(Model(net=net))

    assert "module='net.body': Sequential of 3, 216 parameters" in str(error.value)
    assert "not whole, net: the forward of Untraceable must be traceable" in str(error.value)


def test_choice_does_not_depend_on_where_the_weights_are() -> None:
    with torch.device("meta"):
        model = ImageNet()

    assert paths(model) == paths(ImageNet()) == ["model"]
