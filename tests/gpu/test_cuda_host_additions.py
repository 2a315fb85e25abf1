"""What is added to stages with weights on the host: parameters are at home there too."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelPruning
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from lightning_gpipe import GPipeStrategy
from lightning_gpipe.core.schedules import ActivationCheckpointing
from tests.gpu.models import GPU, ON_GPU, assert_same, on_host
from tests.support.lightning_modules import Classifier, assert_same_weights, fitted

pytestmark = ON_GPU

WIDTH = 8


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


class Gated(nn.Linear):
    """Multiplies by a gate, once it has one."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if "gate" not in self._parameters else y * self.get_parameter("gate").sigmoid()


def pruned(layer: Any) -> None:
    prune.l1_unstructured(layer, "weight", amount=0.5)


def gated(layer: Any) -> None:
    layer.register_parameter("gate", nn.Parameter(torch.linspace(-1, 1, WIDTH).to(layer.weight)))


def of_unit_norm(layer: Any) -> None:
    parametrizations.weight_norm(layer)


def doubled(layer: Any) -> None:
    parametrize.register_parametrization(layer, "weight", Doubled())


ADDITIONS: list[Callable[[Any], None]] = [pruned, gated, of_unit_norm, doubled]


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Gated(WIDTH, WIDTH) for _ in range(4))).double()


def step(module: nn.Module, layers: nn.Sequential, device: str, seed: int) -> Tensor:
    x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(seed)).double()
    layers.zero_grad()
    y: Tensor = module(x.to(device))
    y.square().mean().backward()
    with torch.no_grad():
        for parameter in layers.parameters():
            assert parameter.grad is not None
            parameter.sub_(parameter.grad, alpha=0.1)
    return y.detach()


@pytest.mark.parametrize("mode", ["always", "never"])
@pytest.mark.parametrize("add", ADDITIONS)
def test_additions_between_steps(add: Callable[[Any], None], mode: ActivationCheckpointing) -> None:
    model = layers()
    plain = deepcopy(model).to(GPU)  # whose weight norm differs by 1e-7 from that of a CPU
    pipeline = on_host(*model, chunks=3, activation_checkpointing=mode)

    for seed in range(4):
        if seed == 1:
            for each in (model, plain):
                add(each[0])
                add(each[2])
        found, expected = step(pipeline, model, GPU, seed), step(plain, plain, GPU, seed)
        assert_same(found, expected)

    assert {p.device.type for p in model.parameters()} == {"cpu"}
    assert_same(dict(model.named_parameters()), dict(plain.named_parameters()))


def test_parameter_that_is_added_elsewhere() -> None:
    model = layers()
    pipeline = on_host(*model)
    model[1].register_parameter("gate", nn.Parameter(torch.zeros(WIDTH, device="meta")))

    with pytest.raises(RuntimeError) as error:
        pipeline(torch.randn(6, WIDTH, dtype=torch.float64, device=GPU))

    assert str(error.value) == (
        "the parameters of stage 1 (layer 1, cuda:0) must stay on the host (weights='host'): found "
        "'gate' of Gated on meta. Something moved or replaced it after the pipeline was set up; "
        "the pipeline places its layers itself, so remove calls such as .to() or .cuda() on them."
    )


def test_parameter_that_cannot_come_and_go() -> None:
    model = layers()
    pipeline = on_host(*model)
    model[1].register_parameter("gate", nn.Parameter(torch.eye(WIDTH).to_sparse()))

    with pytest.raises(ValueError, match="must be dense.* got gate of a Gated, a Parameter"):
        pipeline(torch.randn(6, WIDTH, dtype=torch.float64, device=GPU))


class Pruned(Classifier):
    """Prunes a layer before the second epoch."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            pruned(self.layers[2])


def strategy(**options: Any) -> GPipeStrategy:
    return GPipeStrategy([2, 2, 2], chunks=3, **options)


@pytest.mark.filterwarnings("ignore:All 3 stages of the pipeline share one device")
def test_layer_that_is_pruned_in_a_fit(tmp_path: Path) -> None:
    def run(**options: Any) -> L.Trainer:
        return fitted(tmp_path, strategy(**options), build=Pruned, accelerator="gpu", devices=1)

    assert_same_weights(run(weights="host"), run())


@pytest.mark.filterwarnings("ignore:All 3 stages of the pipeline share one device")
def test_callback_that_prunes_again(tmp_path: Path) -> None:
    """Its masks would be on the device, the weights on the host."""
    callbacks = [ModelPruning("l1_unstructured", use_global_unstructured=False, amount=0.2)]

    with pytest.raises(ValueError, match="ModelPruning .* got weights='host'"):
        fitted(
            tmp_path, strategy(weights="host"), callbacks=callbacks, accelerator="gpu", devices=1
        )
