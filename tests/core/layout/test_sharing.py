from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe.core.layout.layout import lay_out
from lightning_gpipe.core.layout.partition import cut
from lightning_gpipe.core.layout.sharing import (
    check_copies,
    check_outside,
    check_sharing,
    followed_slots,
    shared_with_outside,
)

CPU, META = torch.device("cpu"), torch.device("meta")


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


def tied() -> nn.Sequential:
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    module[2].weight = module[0].weight
    return module


def test_layers_of_their_own() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    check_sharing(lay_out(cut(module, [1, 1]), [CPU, META]))


@pytest.mark.parametrize("other", [CPU, META])
def test_weight_shared_by_stages(other: torch.device) -> None:
    check_sharing(lay_out(cut(tied(), [2, 1]), [CPU, other]))


def test_shared_weight_lives_where_the_first_stage_is() -> None:
    module = tied()

    found = lay_out(cut(module, [2, 1]), [CPU, META]).homes

    lives = {name: found[module.get_parameter(name)] for name in ("2.weight", "0.bias", "2.bias")}
    assert lives == {"2.weight": CPU, "0.bias": CPU, "2.bias": META}


def test_slots_of_parameters_that_live_elsewhere() -> None:
    module = tied()
    found = lay_out(cut(module, [2, 1]), [CPU, META]).homes

    assert followed_slots([module[2]], META, found) == {(module[2], "weight")}
    assert followed_slots([module[0]], CPU, found) == set()
    assert followed_slots([nn.Linear(2, 2)], CPU, found) == set()  # unknown: not away


def test_buffer_shared_across_devices() -> None:
    module = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    module[1].running_mean = module[0].running_mean

    with pytest.raises(ValueError) as error:
        check_sharing(lay_out(cut(module, [1, 1]), [CPU, META]))

    assert "buffer layer 0.running_mean (cpu) is layer 1.running_mean (meta)" in str(error.value)


@pytest.mark.parametrize("other", [CPU, META])
def test_module_shared_by_stages(other: torch.device) -> None:
    inner = nn.ReLU()
    module = nn.Sequential(Wrapped(inner), Wrapped(inner))

    with pytest.raises(ValueError, match="must not share modules") as error:
        check_sharing(lay_out(cut(module, [1, 1]), [CPU, other]))

    assert "module layer 0.inner (stage 0) is layer 1.inner (stage 1)" in str(error.value)
    assert "Choose a balance" in str(error.value)


def test_module_shared_within_a_stage() -> None:
    inner = nn.ReLU()

    check_sharing(lay_out(cut(nn.Sequential(Wrapped(inner), Wrapped(inner)), [2]), [CPU]))


def test_every_fault_is_named() -> None:
    inner = nn.ReLU()
    module = nn.Sequential(nn.BatchNorm1d(2), Wrapped(inner), Wrapped(inner), nn.BatchNorm1d(2))
    module[3].running_var = module[0].running_var

    with pytest.raises(ValueError) as error:
        check_sharing(lay_out(cut(module, [2, 2]), [CPU, META]))

    assert "module layer 1.inner (stage 0) is layer 2.inner (stage 1)" in str(error.value)
    assert "buffer layer 0.running_var (cpu) is layer 3.running_var (meta)" in str(error.value)


class Root(nn.Module):
    """A batch norm in each of two stages, and one outside."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2))
        self.head = Wrapped(nn.BatchNorm1d(2))


def test_buffer_shared_with_what_is_outside() -> None:
    root = Root()
    root.head.inner.running_mean = root.layers[0].running_mean
    partitions = cut(root.layers, [1, 1])

    check_outside(root, [root.layers], lay_out(partitions, [CPU, CPU]), CPU)
    with pytest.raises(ValueError, match=r"got head.inner.running_mean \(meta\) is in stage 0"):
        check_outside(root, [root.layers], lay_out(partitions, [CPU, META]), META)


def test_layer_used_outside_of_the_pipeline_too() -> None:
    root = Root()
    root.first = root.layers[0]

    with pytest.raises(ValueError, match="got first.running_mean .* first.running_var"):
        check_outside(root, [root.layers], lay_out(cut(root.layers, [1, 1]), [CPU, META]), META)


def test_parameters_shared_with_what_is_outside() -> None:
    root = Root()
    root.head.inner.weight = root.layers[0].weight

    (found,) = shared_with_outside(root, [root.layers])

    assert found is root.layers[0].weight


class Drawing(nn.Module):
    def __init__(self, generators: object) -> None:
        super().__init__()
        self.generators = generators


def test_generator_shared_by_stages() -> None:
    """Two threads would draw from it by turns, in any order."""
    own, shared = torch.Generator(), torch.Generator()
    module = nn.Sequential(
        Drawing([own, shared]), Wrapped(Drawing({"dropout": shared})), Drawing(own)
    )

    check_sharing(lay_out(cut(module, [3]), [CPU]))
    with pytest.raises(ValueError) as error:
        check_sharing(lay_out(cut(module, [1, 2]), [CPU, CPU]))

    assert str(error.value) == (
        "stages must not share modules or generators, nor buffers across devices: got generator "
        "layer 0.generators (stage 0) is layer 1.inner.generators (stage 1); generator layer "
        "0.generators (stage 0) is layer 2.generators (stage 1). Choose a balance that puts these "
        "layers into one stage, or do not share them."
    )


class Quantised(nn.Parameter):
    """A weight that is more than its values."""


def holding(attribute: object) -> Any:
    """A layer whose weight has an attribute."""
    layer = nn.Linear(2, 2)
    weight: Any = Quantised(torch.zeros(2, 2), requires_grad=False)
    weight.scales = attribute
    layer.weight = weight
    return layer


@pytest.mark.parametrize(
    "attribute",
    [
        torch.zeros(2),
        [1, {"a": (torch.zeros(2),)}],
        SimpleNamespace(inner=SimpleNamespace(absmax=torch.zeros(2))),
    ],
)
def test_quantised_weight_with_scales_on_one_device_is_not_copied(attribute: object) -> None:
    layer = holding(attribute)
    slots = followed_slots([layer], META, {layer.weight: CPU})
    with pytest.raises(ValueError) as error:
        check_copies(slots, torch.device("cuda", 1), {layer.weight: CPU})

    assert str(error.value) == (
        "a weight that stages on several devices share must be all in its values: got weight of a "
        "Linear, a Quantised with tensors in scales, on cpu and cuda:1. Choose a balance that puts "
        "the layers that share it into stages of one device, or quantise them without sharing it."
    )


def test_weight_whose_attributes_are_where_its_copy_is() -> None:
    looped = SimpleNamespace(name="nf4")
    looped.itself = looped
    for attribute in (looped, "nf4", None, 3):
        layer = holding(attribute)
        check_copies([(layer, "weight")], torch.device("cuda", 1), {layer.weight: CPU})
    # Of another process, in which the attributes are with the weight too.
    layer = holding(torch.zeros(2))
    check_copies([(layer, "weight")], CPU, {layer.weight: META})
    # A mark that a library has put on a trained one is not needed to compute with it.
    plain: Any = nn.Linear(2, 2)
    plain.weight.main_grad = torch.zeros(2, 2)
    check_copies([(plain, "weight")], torch.device("cuda", 1), {plain.weight: CPU})


CUDA = torch.device("cuda", 1)


@pytest.mark.parametrize("attribute", [torch.zeros(2), "nf4", SimpleNamespace(a=[torch.zeros(2)])])
def test_weight_on_the_host_comes_with_its_attributes(attribute: object) -> None:
    layer = holding(attribute)

    check_copies([(layer, "weight")], CUDA, {layer.weight: CPU}, on_host=True)


def test_trained_tensor_beside_a_weight_on_the_host() -> None:
    """Its gradient would be lost in the copy."""
    layer = holding(SimpleNamespace(inner=[torch.zeros(2, requires_grad=True)]))

    with pytest.raises(ValueError) as error:
        check_copies([(layer, "weight")], CUDA, {layer.weight: CPU}, on_host=True)

    assert str(error.value) == (
        "a tensor in an attribute of a weight at home on the host must not require a gradient: got "
        "weight of a Linear, a Quantised with scales. Make it a parameter of the layer, or write "
        "weights='device'."
    )


def test_mark_on_a_plain_weight_on_the_host() -> None:
    layer: Any = nn.Linear(2, 2)
    layer.weight.main_grad = torch.zeros(2, 2, requires_grad=True)

    check_copies([(layer, "weight")], CUDA, {layer.weight: CPU}, on_host=True)


class Opaque(nn.Parameter):
    """A weight that does not say what it is made of."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it without @classmethod
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize(
    "weight", [Tensor._make_subclass(Opaque, torch.eye(2)), nn.Parameter(torch.eye(2).to_sparse())]
)
def test_weight_that_cannot_come_and_go(weight: Any) -> None:
    layer: Any = nn.Linear(2, 2)
    layer.weight = weight

    with pytest.raises(ValueError) as error:
        check_copies([(layer, "weight")], CUDA, {weight: CPU}, on_host=True)

    assert str(error.value) == (
        "a weight at home on the host must be dense, or of a class that says by __tensor_flatten__ "
        f"what it is made of: got weight of a Linear, a {type(weight).__name__}. Write "
        "weights='device'."
    )
