"""Promise: a flattened model computes what the model does, under the same names."""

import copy
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_gpipe import GPipeStrategy
from lightning_gpipe.core.frontends.flatten import FlatSequential, flatten
from tests.support.lightning_modules import FEATURES, WIDTH, Classifier, assert_same_weights, fitted
from tests.support.models import assert_same, assert_same_step, step
from tests.support.pipes import Pipe


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.downsample(x))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(FEATURES, 4, 1)
        self.bn1 = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = nn.Sequential(BasicBlock(4, 4), BasicBlock(4, 4))
        self.layer2 = nn.Sequential(BasicBlock(4, 6), BasicBlock(6, 6))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(6, WIDTH)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, :, None, None].expand(-1, -1, 2, 2)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer2(self.layer1(x))
        return self.fc(torch.flatten(self.avgpool(x), 1))


def to_image(x: Tensor) -> Tensor:
    return x[:, :, None, None].expand(-1, -1, 2, 2)


def order() -> list[Any]:
    names = ["conv1", "bn1", "relu", "layer1", "layer2", "avgpool"]
    return [to_image, *names, nn.Flatten(1), "fc"]


NAMES = [
    *["order[0]", "conv1", "bn1", "relu", "layer1.0", "layer1.1", "layer2.0", "layer2.1"],
    *["avgpool", "order[7]", "fc"],
]


def rows(count: int = 6) -> Tensor:
    torch.manual_seed(4)
    return torch.randn(count, FEATURES, dtype=torch.float64, requires_grad=True)


@pytest.fixture
def resnet() -> ResNet:
    torch.manual_seed(0)
    return ResNet()


@pytest.fixture
def flat(resnet: ResNet) -> nn.Sequential:
    return flatten(copy.deepcopy(resnet), order())


def test_same_numbers(resnet: ResNet, flat: nn.Sequential) -> None:
    assert_same(step(flat, rows())._asdict(), step(resnet, rows())._asdict())
    assert_same(dict(flat.named_buffers()), dict(resnet.named_buffers()))


def test_layers_keep_their_place_as_name(resnet: ResNet, flat: nn.Sequential) -> None:
    assert [name for name, _ in flat.named_children()] == NAMES
    assert list(flat.state_dict()) == list(resnet.state_dict())
    assert [n for n, _ in flat.named_parameters()] == [n for n, _ in resnet.named_parameters()]
    assert type(flat).forward is nn.Sequential.forward


def test_layers_are_the_models_own(resnet: ResNet) -> None:
    flat = flatten(resnet.eval(), order())

    assert flat[4] is resnet.layer1[0]
    assert not flat.training
    assert resnet.layer1[0] in resnet.modules()


def test_state_loads_both_ways(flat: nn.Sequential) -> None:
    other = ResNet()
    other.load_state_dict(flat.state_dict())
    assert_same(dict(other.state_dict()), dict(flat.state_dict()))

    nn.init.ones_(other.fc.weight)
    flat.load_state_dict(other.state_dict())
    assert_same(dict(flat.state_dict()), dict(other.state_dict()))


def test_state_within_a_larger_model(resnet: ResNet, flat: nn.Sequential) -> None:
    plain, other = (nn.ModuleDict({"net": each}) for each in (resnet, flat))
    nn.init.ones_(resnet.fc.weight)

    other.load_state_dict(plain.state_dict())

    assert_same(dict(other.state_dict()), dict(plain.state_dict()))


@pytest.mark.parametrize("key", ["layer1.2.bn1.weight", "layer1.weight", "layer3.0.bias", "bias"])
def test_unexpected_keys_are_refused(key: str, flat: nn.Sequential) -> None:
    with pytest.raises(RuntimeError, match=f'Unexpected key.* "{key}"'):
        flat.load_state_dict({**flat.state_dict(), key: torch.ones(3)})


def test_missing_keys_are_refused(flat: nn.Sequential) -> None:
    state = flat.state_dict()
    del state["layer2.1.bn2.bias"]

    with pytest.raises(RuntimeError, match='Missing key.* "layer2.1.bn2.bias"'):
        flat.load_state_dict(state)


def test_paths_lead_to_the_same(flat: nn.Sequential) -> None:
    for name, module in flat.named_modules():
        assert flat.get_submodule(name) is module
    for name, parameter in flat.named_parameters():
        assert flat.get_parameter(name) is parameter
    assert [*flat.get_submodule("layer1").children()] == [flat[4], flat[5]]
    with pytest.raises(AttributeError, match="layer3"):
        flat.get_submodule("layer3.0")


def test_functional_call(resnet: ResNet, flat: nn.Sequential) -> None:
    zeros = {name: torch.zeros_like(p) for name, p in flat.named_parameters()}

    assert torch.func.functional_call(flat, zeros, rows()).count_nonzero() == 0
    assert_same(flat(rows()).detach(), resnet(rows()).detach())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies(copied: Callable[[Any], Any], flat: nn.Sequential) -> None:
    other = copied(flat)

    assert list(other._modules) == NAMES
    assert_same(other(rows()).detach(), flat(rows()).detach())


def test_object_that_was_not_initialised_has_no_layers() -> None:
    assert not hasattr(FlatSequential.__new__(FlatSequential), "layer1")


def test_slices_keep_the_names(flat: nn.Sequential) -> None:
    assert [name for name, _ in flat[3:6].named_children()] == NAMES[3:6]


# Nested Sequentials.


def test_nested_sequentials_at_any_depth() -> None:
    linear = partial(nn.Linear, 2, 2)
    module = nn.Sequential(nn.Sequential(linear(), nn.Sequential(linear()), nn.Tanh()), linear())

    flat = flatten(module.double())

    assert [name for name, _ in flat.named_children()] == ["0.0", "0.1.0", "0.2", "1"]
    assert list(flat.state_dict()) == list(module.state_dict())
    x = torch.ones(3, 2, dtype=torch.float64)
    assert_same(step(flat, x)._asdict(), step(copy.deepcopy(module), x)._asdict())


class Residual(nn.Sequential):
    def forward(self, input: Tensor) -> Tensor:
        return input + super().forward(input)


class Scaled(nn.Sequential):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.scale = nn.Parameter(torch.ones(()))


def hooked() -> nn.Sequential:
    module = nn.Sequential(nn.Linear(2, 2))
    module.register_forward_hook(lambda module, args, output: output * 2)
    return module


@pytest.mark.parametrize(
    "build", [lambda: Residual(nn.Linear(2, 2)), lambda: Scaled(nn.Linear(2, 2)), hooked]
)
def test_sequential_that_does_more_is_one_layer(build: Callable[[], nn.Sequential]) -> None:
    inner = build()
    module = nn.Sequential(nn.Sequential(inner, nn.Tanh()), nn.Linear(2, 2))

    flat = flatten(module)

    assert flat[0] is inner
    assert [name for name, _ in flat.named_children()] == ["0.0", "0.1", "1"]
    assert torch.equal(flat(torch.ones(3, 2)), module(torch.ones(3, 2)))
    with pytest.raises((TypeError, ValueError)):
        flatten(inner)


def test_order_may_name_what_is_deeper(resnet: ResNet) -> None:
    names = ["layer1.0", "layer1.1"]
    flat = flatten(resnet, [*order()[:4], *names, *order()[5:]])

    assert [*flat._modules][4:6] == names


def test_layer_that_stands_twice_is_not_lost() -> None:
    linear = nn.Linear(2, 2)
    flat = flatten(nn.Sequential(linear, nn.Sequential(linear, nn.Tanh(), linear), linear))

    assert [*flat._modules] == ["0", "1.0", "1.1", "1.2", "2"]


# Refusals.


@pytest.mark.parametrize(
    "given, kind, message",
    [
        (
            None,
            TypeError,
            "must be given an order, unless .* plain nn.Sequential: got ResN",
        ),
        (["conv1", "bn2", "", "layer3.0"], ValueError, r"got \['bn2', '', 'layer3.0'\].* 'layer2'"),
        ([*order(), "relu", "layer1.0"], ValueError, r"once: got \['relu', 'layer1.0'\] again"),
        (
            [e for e in order() if e not in ("fc", "layer1")],
            ValueError,
            "leaves out 'layer1', 'fc'",
        ),
        ([*order()[:4], "layer1.1", *order()[5:]], ValueError, "it leaves out 'layer1.0'"),
        ([*order(), nn.Linear(2, 2)], ValueError, r"got order\[9\], a Linear. Write the name"),
        ([*order(), nn.Flatten], TypeError, r"order\[9\]=.*Flatten"),
        ([*order(), 3], TypeError, r"order\[9\]=3, a int"),
    ],
)
def test_order_that_does_not_fit(
    given: Any, kind: type[Exception], message: str, resnet: ResNet
) -> None:
    with pytest.raises(kind, match=message):
        flatten(resnet, given)


def test_parameter_of_the_model_itself(resnet: ResNet) -> None:
    resnet.token = nn.Parameter(torch.ones(2))
    resnet.table = nn.Buffer(torch.ones(2), persistent=False)

    with pytest.raises(ValueError, match="it leaves out 'token', 'table'"):
        flatten(resnet, order())


def test_hooks_of_the_model_itself(resnet: ResNet) -> None:
    resnet.register_forward_pre_hook(lambda module, args: None)

    with pytest.raises(ValueError, match="hooks on ResNet itself would be lost: got _forward_pre"):
        flatten(resnet, order())


# As pipelines.


@pytest.mark.parametrize("balance", [[11], [4, 7], [2, 3, 3, 3]])
def test_pipeline(balance: list[int], resnet: ResNet, flat: nn.Sequential, pipe: Pipe) -> None:
    for each in (resnet, flat):
        each.eval()  # batch norms normalise as on one device
    pipeline = pipe(flat, balance)

    assert_same_step(pipeline, resnet, rows())
    assert list(pipeline.state_dict()) == list(resnet.state_dict())


def test_state_loads_into_a_pipeline(resnet: ResNet, flat: nn.Sequential, pipe: Pipe) -> None:
    pipeline = pipe(flat, [4, 7])
    nn.init.ones_(resnet.fc.weight)

    pipeline.load_state_dict(resnet.state_dict())

    assert_same(dict(pipeline.state_dict()), dict(resnet.state_dict()))


class Frozen(Classifier):
    """Batch norms in eval mode, so that micro-batches change nothing."""

    def on_train_epoch_start(self) -> None:
        for module in self.layers.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()


def build(flat: bool) -> Frozen:
    net = ResNet()
    return Frozen(layers=flatten(net, order()) if flat else net)  # type: ignore[arg-type]  # runs


def test_lightning_module_with_a_plain_checkpoint(tmp_path: Path) -> None:
    pipelined = partial(GPipeStrategy, [3, 4, 4], chunks=3)
    plain = fitted(tmp_path, build=partial(build, False), max_epochs=4)
    half = fitted(tmp_path, pipelined(), devices=3, build=partial(build, True), max_epochs=2)
    half.save_checkpoint(tmp_path / "half.ckpt")

    plain_again = {"build": partial(build, False)}
    flat_and_plain = {"build": partial(build, True)}
    flat_and_piped = {"build": partial(build, True), "strategy": pipelined(), "devices": 3}
    for options in (plain_again, flat_and_plain, flat_and_piped):
        made: dict[str, Any] = {"ckpt_path": tmp_path / "half.ckpt", "max_epochs": 4, **options}
        assert_same_weights(fitted(tmp_path, **made), plain)
