"""Transparency: under 1F1B training_step meets its own parameters, as in a plain Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_gpipe import GPipeStrategy
from tests.support.lightning_modules import (
    FEATURES,
    WIDTH,
    Classifier,
    Data,
    assert_same_weights,
    fitted,
    trainer,
)

pytestmark = [
    pytest.mark.usefixtures("one_intra_op_thread"),
    pytest.mark.parametrize("threads", [True, False]),
    pytest.mark.filterwarnings("ignore:training_step must leave nothing on the module"),
]


ONLY_TRAINING: dict[str, Any] = {"limit_val_batches": 0, "num_sanity_val_steps": 0}


def piped(**options: Any) -> dict[str, Any]:
    return {"strategy": GPipeStrategy([2, 2, 2], 3, schedule="1f1b", **options), "devices": 3}


class Looking(Classifier):
    """Weighs its loss by moments of the optimizer, and keeps a value per parameter."""

    def __init__(self) -> None:
        super().__init__("adam")
        self.norms: dict[nn.Parameter, float] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        moments = x.new_zeros(())
        output = self(x)
        for parameter in self.parameters():
            state = self.trainer.optimizers[0].state[parameter]
            if state:
                moments = moments + state["exp_avg"].abs().sum()
            self.norms[parameter] = float(parameter.detach().norm())
        return F.cross_entropy(output, y) * (1 + moments)


def test_optimizer_state_and_values_per_parameter(tmp_path: Path, threads: bool) -> None:
    """Once the state got keys of shadows, with which save_checkpoint raised KeyError."""
    plain, gpipe = (
        fitted(tmp_path, build=Looking),
        fitted(tmp_path, build=Looking, **piped(threads=threads)),
    )

    assert_same_weights(gpipe, plain)
    gpipe.save_checkpoint(tmp_path / "a.ckpt")
    for each in (plain, gpipe):
        module = each.lightning_module
        assert isinstance(module, Looking)
        assert set(module.norms) == set(module.parameters()) == set(each.optimizers[0].state)


class Conditioned(Classifier):
    """Another network computes the scale of each layer."""

    by_rows = False

    def __init__(self) -> None:
        super().__init__()
        self.hyper = nn.Linear(FEATURES, WIDTH).double()
        for layer in self.linear():
            layer.register_forward_hook(lambda layer, args, output: output * layer.scale)

    def linear(self) -> list[nn.Module]:
        return [layer for layer in self.layers if isinstance(layer, nn.Linear)]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        condition = batch[0] if self.by_rows else torch.ones(1, FEATURES).double()
        scale = 1 + self.hyper(condition).mean(0)
        for layer in self.linear():
            layer.scale = scale
        return super().training_step(batch, batch_idx)


class ConditionedByRows(Conditioned):
    by_rows = True


@pytest.mark.parametrize("verify", ["sample", False])
def test_network_that_computes_scales_of_layers(tmp_path: Path, threads: bool, verify: Any) -> None:
    """Once its gradient was None, so it was not trained."""
    plain = fitted(tmp_path, build=Conditioned, **ONLY_TRAINING)
    gpipe = fitted(
        tmp_path, build=Conditioned, **ONLY_TRAINING, **piped(threads=threads, verify=verify)
    )

    assert_same_weights(gpipe, plain)


@pytest.mark.parametrize("verify", ["sample", True, False])
def test_scale_by_rows_is_refused(tmp_path: Path, threads: bool, verify: Any) -> None:
    made = trainer(tmp_path, **ONLY_TRAINING, **piped(threads=threads, verify=verify))
    with pytest.raises(RuntimeError, match="Pass it to the layers with their input"):
        made.fit(ConditionedByRows(), Data())
