import pytest
import torch
from torch import nn

from lightning_gpipe.core.partition import cut
from lightning_gpipe.core.sharing import check_outside, check_sharing

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

    check_sharing(cut(module, [1, 1]), [CPU, META])


def test_weight_shared_on_one_device() -> None:
    check_sharing(cut(tied(), [2, 1]), [CPU, CPU])


def test_weight_shared_within_a_stage() -> None:
    check_sharing(cut(tied(), [3]), [CPU])


def test_weight_shared_across_devices() -> None:
    with pytest.raises(ValueError, match="nor tensors across devices") as error:
        check_sharing(cut(tied(), [2, 1]), [CPU, META])

    assert "layer 0.weight (cpu) is layer 2.weight (meta)" in str(error.value)


def test_buffer_shared_across_devices() -> None:
    module = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    module[1].running_mean = module[0].running_mean

    with pytest.raises(ValueError) as error:
        check_sharing(cut(module, [1, 1]), [CPU, META])

    assert "layer 0.running_mean (cpu) is layer 1.running_mean (meta)" in str(error.value)


@pytest.mark.parametrize("other", [CPU, META])
def test_module_shared_by_stages(other: torch.device) -> None:
    inner = nn.ReLU()
    module = nn.Sequential(Wrapped(inner), Wrapped(inner))

    with pytest.raises(ValueError, match="must not share modules") as error:
        check_sharing(cut(module, [1, 1]), [CPU, other])

    assert "module layer 0.inner (stage 0) is layer 1.inner (stage 1)" in str(error.value)
    assert "Choose a balance" in str(error.value)


def test_module_shared_within_a_stage() -> None:
    inner = nn.ReLU()

    check_sharing(cut(nn.Sequential(Wrapped(inner), Wrapped(inner)), [2]), [CPU])


def test_every_fault_is_named() -> None:
    module = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    module[1].bias = module[0].bias
    module[2].weight = module[0].weight

    with pytest.raises(ValueError) as error:
        check_sharing(cut(module, [1, 2]), [CPU, META])

    assert "layer 0.bias (cpu) is layer 1.bias (meta)" in str(error.value)
    assert "layer 0.weight (cpu) is layer 2.weight (meta)" in str(error.value)


def test_weight_shared_with_what_is_outside() -> None:
    root = nn.Module()
    root.layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    root.head = Wrapped(nn.Linear(2, 2))
    root.head.inner.weight = root.layers[0].weight
    partitions = cut(root.layers, [1, 1])

    check_outside(root, root.layers, partitions, [CPU, CPU], CPU)
    with pytest.raises(ValueError, match=r"got head.inner.weight \(meta\) is in stage 0 \(cpu\)"):
        check_outside(root, root.layers, partitions, [CPU, META], META)


def test_layer_used_outside_of_the_pipeline_too() -> None:
    root = nn.Module()
    root.layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    root.first = root.layers[0]

    with pytest.raises(ValueError, match="got first.weight .* first.bias"):
        check_outside(root, root.layers, cut(root.layers, [1, 1]), [CPU, META], META)
