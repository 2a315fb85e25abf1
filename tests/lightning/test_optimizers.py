"""Optimizers and callbacks that treat all parameters as one; see also ``tests/gpu``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning, ModelPruning
from torch import nn

from lightning_gpipe import GPipeStrategy
from lightning_gpipe.strategy.refusals import check_fit
from tests.support.lightning_modules import Classifier, assert_same_weights, fitted


def strategy() -> GPipeStrategy:
    return GPipeStrategy([2, 4], chunks=3)


@pytest.fixture
def on_two_devices() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))


class Curved(Classifier):
    """Its optimizer runs forward and backward several times in a step."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


def test_lbfgs(tmp_path: Path) -> None:
    pipelined = fitted(tmp_path, strategy(), devices=2, build=Curved)

    assert_same_weights(pipelined, fitted(tmp_path, build=Curved))


def test_lbfgs_over_several_devices(on_two_devices: nn.Sequential) -> None:
    with pytest.raises(ValueError, match="LBFGS updates .* must have all of them: got cpu, meta"):
        check_fit([], [torch.optim.LBFGS(on_two_devices.parameters())], split=False)

    check_fit([], [torch.optim.LBFGS(on_two_devices[0].parameters())], split=False)
    check_fit([], [torch.optim.Adam(on_two_devices.parameters())], split=False)


class Clipping(torch.optim.SGD):
    """Divides its gradients by a norm over all of them."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            nn.utils.clip_grad_norm_(group["params"], 0.1)
        return super().step(closure)


@pytest.mark.parametrize("where", ["split", "sharded"])
def test_optimizer_that_divides_by_a_norm_over_all(where: str, on_two_devices: nn.Module) -> None:
    """A step of one process had the norm of its own stages."""
    optimizers = [Clipping(on_two_devices.parameters(), 0.1)]
    settings = {"split": False, "sharded": False}

    check_fit([], optimizers, **settings)
    with pytest.raises(ValueError, match="Clipping updates a parameter by the gradients of others"):
        check_fit([], optimizers, **{**settings, where: True})


@pytest.mark.parametrize("together", [True, False])
def test_pruning(tmp_path: Path, together: bool) -> None:
    def run(*args: Any, **options: Any) -> L.Trainer:
        pruning = ModelPruning("l1_unstructured", amount=0.3, use_global_unstructured=together)
        return fitted(tmp_path, *args, callbacks=[pruning], **options)

    assert_same_weights(run(strategy(), devices=2), run())


def test_pruning_over_several_devices(on_two_devices: nn.Sequential) -> None:
    def pruning(*layers: nn.Module, together: bool = True) -> list[Any]:
        return [
            ModelPruning(
                "l1_unstructured",
                parameters_to_prune=[(layer, "weight") for layer in layers],
                use_global_unstructured=together,
            )
        ]

    with pytest.raises(ValueError, match="ranks all weights.*on one device: got cpu, meta"):
        check_fit(pruning(*on_two_devices), [], split=False)

    check_fit(pruning(on_two_devices[0]), [], split=False)
    check_fit(pruning(*on_two_devices, together=False), [], split=False)


class Thaws(BaseFinetuning):
    """Trains the layers from the second epoch on."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.layers)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.layers, optimizer)


class Thawed(Classifier):
    """Its optimizer begins with what is trained at first."""

    def configure_optimizers(self) -> Any:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.SGD(trained, lr=0.1, momentum=0.9)


def test_finetuning(tmp_path: Path) -> None:
    def run(*args: Any, **options: Any) -> L.Trainer:
        thaws = Thaws()
        made = fitted(tmp_path, *args, build=Thawed, callbacks=[thaws], max_epochs=4, **options)
        assert "finetune_function" not in vars(thaws), "the callback is not as the user made it"
        return made

    assert_same_weights(run(strategy(), devices=2), run())
