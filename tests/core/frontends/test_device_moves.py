from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from lightning_gpipe.core.frontends.device_moves import (
    choose_devices,
    forget_values,
    on_meta,
    place,
    place_around,
    recall,
    replaceable,
)

CPU, META = torch.device("cpu"), torch.device("meta")


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(2))
        self.register_buffer("offset", torch.empty(2))


class Initialised(Scale):
    def reset_parameters(self) -> None:
        nn.init.constant_(self.scale, 3.0)
        nn.init.constant_(self.get_buffer("offset"), 4.0)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        self.head = nn.Linear(2, 2)
        self.own = nn.Parameter(torch.ones(2))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.register_buffer("classes", torch.ones(3))
        self.accuracy = MulticlassAccuracy(3)


def test_parameters_stay_the_same_objects() -> None:
    layer = nn.Linear(2, 2)
    weight = layer.weight

    place(layer, CPU)

    assert layer.weight is weight


def test_module_on_meta_is_created_and_initialised() -> None:
    with META:
        module = nn.Sequential(nn.Linear(2, 2), Initialised())

    place(module, CPU)

    assert {tensor.device for tensor in module.state_dict().values()} == {CPU}
    assert module.get_parameter("1.scale").tolist() == [3.0, 3.0]
    assert module.get_buffer("1.offset").tolist() == [4.0, 4.0]
    assert module.get_parameter("0.weight").abs().max() <= 2**-0.5


def test_module_with_memory_keeps_its_values() -> None:
    with META:
        late = nn.Linear(2, 2)
    early = nn.Linear(2, 2)
    weight = early.weight.detach().clone()

    place(nn.Sequential(early, late), CPU)

    assert torch.equal(early.weight, weight)
    assert not on_meta(late)


def test_module_on_meta_without_initialisation() -> None:
    with META:
        module = nn.Sequential(Scale())

    with pytest.raises(TypeError, match=r"must have reset_parameters\(\).*got Scale without"):
        place(module, CPU)


@pytest.mark.parametrize("device, expected", [(CPU, False), (META, True)])
@pytest.mark.parametrize("module", [nn.Linear, lambda *_: nn.BatchNorm1d(2, affine=False)])
def test_on_meta(module: type[nn.Module], device: torch.device, expected: bool) -> None:
    with device:
        assert on_meta(nn.Sequential(module(2, 2))) is expected


def test_module_without_tensors_is_not_on_meta() -> None:
    assert not on_meta(nn.ReLU())


# To be told apart on a machine without a GPU, what was moved is moved to meta.


def test_all_but_the_inner_module_is_moved() -> None:
    model = Model()
    inner = dict(model.net.layers.named_parameters())

    place_around(model, {model.net.layers}, META)

    assert model.net.head.weight.is_meta
    assert model.net.own.is_meta
    assert model.classes.is_meta
    assert all(not parameter.is_meta for parameter in inner.values())
    assert all(model.net.layers.get_parameter(name) is p for name, p in inner.items())


def test_metrics_are_moved() -> None:
    model = Model()

    place_around(model, {model.net.layers}, META)

    assert model.accuracy.device == META
    assert isinstance(model.accuracy.tp, Tensor)
    assert model.accuracy.tp.is_meta


def test_nothing_is_around_the_module_itself() -> None:
    model = Model()

    place_around(model, {model}, META)

    assert not on_meta(model)


def test_tied_parameters_on_meta_stay_tied() -> None:
    """Once each module got a parameter of its own, so the weights were tied no longer."""
    with META:
        one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    two.weight = one.weight

    place(nn.Sequential(one, two), CPU)

    assert one.weight is two.weight
    assert one.weight.device == CPU


def test_what_has_values_keeps_them_beside_what_is_on_meta() -> None:
    """Once the whole module was initialised again to make the buffer: loaded weights were lost."""
    with META:
        module = Initialised()
    module.load_state_dict({"scale": torch.tensor([7.0, 8.0])}, strict=False, assign=True)

    place(module, CPU)

    assert module.scale.tolist() == [7.0, 8.0]
    assert module.get_buffer("offset").tolist() == [4.0, 4.0]


def test_attention_on_meta() -> None:
    with META:
        module = nn.MultiheadAttention(4, 2)

    place(module, CPU)

    assert not on_meta(module)
    assert module.in_proj_weight.abs().max() > 0


@pytest.mark.parametrize(
    "found, stages, chosen",
    [(2, 4, 2), (4, 4, 4), (8, 4, 4), (3, 4, 2), (4, 6, 3), (4, 9, 3), (4, 1, 1), (1, 7, 1)],
)
def test_gpus_by_default(
    found: int, stages: int, chosen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once 6 stages on a machine with 4 GPUs were an error, although no device was asked for."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: found)

    assert choose_devices(None, stages) == [torch.device("cuda", k) for k in range(chosen)]


def test_one_gpu_of_several_for_all_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)

    with pytest.warns(UserWarning, match="all 7 stages share one GPU.* of the 4 GPUs divides 7"):
        assert choose_devices(None, 7) == [torch.device("cuda", 0)]


def test_no_gpu_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)

    assert choose_devices(None, 3) == [torch.device("cpu")] * 3


def test_devices_that_do_not_divide_the_stages() -> None:
    with pytest.raises(ValueError, match=r"3 devices. The devices are \['cuda:0', 'cuda:1',"):
        choose_devices(["cuda:0", "cuda:1", "cuda:2"], 4)


def lose(module: nn.Linear) -> None:
    """Make it a module whose values another process has had for a while."""
    with replaceable(module):
        for parameter in module.parameters():
            forget_values(parameter)
            recall(parameter, CPU)
    nn.init.ones_(module.weight)


@pytest.mark.parametrize("change", [lambda module: place(module, CPU), lose])
def test_attributes_and_hooks_stay(change: Callable[[nn.Linear], None]) -> None:
    """Once hooks were gone where a parameter had been on meta, and attributes where it began so."""
    with META if change is not lose else nullcontext():
        module: Any = nn.Linear(2, 2)
    weight = module.weight
    weight.decays = False
    seen: list[Tensor] = []
    weight.register_hook(lambda gradient: 3 * gradient)
    weight.register_post_accumulate_grad_hook(seen.append)

    change(module)
    module(torch.ones(1, 2)).sum().backward()

    assert module.weight is weight
    assert not weight.decays
    assert weight.grad.tolist() == [[3.0, 3.0], [3.0, 3.0]]
    assert seen == [weight]
