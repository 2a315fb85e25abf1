"""Plain checkpoints: a shared weight is one weight in the optimizer and the checkpoint."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_gpipe import GPipeStrategy
from tests.support.lightning_modules import WIDTH, Classifier, assert_same_weights, fitted


class TiedInside(Classifier):
    names = ("layers.2.weight", "layers.4.weight")

    def __init__(self) -> None:
        super().__init__(optimizer="adam")
        shared = self.layers.get_parameter("2.weight")
        self.layers[4].register_parameter("weight", shared)


class TiedOutside(Classifier):
    """The loss uses a weight of the first stage."""

    names = ("layers.2.weight", "again.weight")

    def __init__(self) -> None:
        super().__init__(optimizer="adam")
        self.again = torch.nn.Linear(WIDTH, WIDTH).double()
        self.again.register_parameter("weight", self.layers.get_parameter("2.weight"))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.tanh(self.again(self.layers(x.double()))))


@pytest.mark.parametrize("build", [TiedInside, TiedOutside])
def test_fit_and_checkpoint(build: Any, tmp_path: Path) -> None:
    plain = fitted(tmp_path / "plain", "auto", build=build, max_epochs=2)
    pipelined = fitted(
        tmp_path / "pipelined", GPipeStrategy([3, 3]), devices=2, build=build, max_epochs=2
    )

    assert_same_weights(pipelined, plain)
    one, other = (saved(made, tmp_path / "saved.ckpt") for made in (pipelined, plain))
    assert one["state_dict"].keys() == other["state_dict"].keys()
    (optimizer,), (expected,) = one["optimizer_states"], other["optimizer_states"]
    assert optimizer["state"].keys() == expected["state"].keys()
    tied = [one["state_dict"][name] for name in build.names]
    assert tied[0].data_ptr() == tied[1].data_ptr()


def saved(made: L.Trainer, path: Path) -> dict[str, Any]:
    made.save_checkpoint(path)
    checkpoint: dict[str, Any] = torch.load(path, weights_only=True)
    return checkpoint
