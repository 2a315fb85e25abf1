"""Loss terms of layers in a fit: collected in training_step, or else an error says how."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_gpipe import GPipeStrategy, collect_loss_terms, loss_term
from tests.support.lightning_modules import (
    FEATURES,
    WIDTH,
    Classifier,
    assert_same_weights,
    fitted,
)
from tests.support.pipes import MODES


class Penalized(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        loss_term("activity", y.square().mean(), reduction="mean")
        return y


def layers() -> nn.Sequential:
    return nn.Sequential(Penalized(FEATURES, WIDTH), nn.Tanh(), Penalized(WIDTH, WIDTH))


class Terms(Classifier):
    def __init__(self) -> None:
        super().__init__(layers=layers())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        with collect_loss_terms() as terms:
            logits = self(x)
        self.log("activity", terms["activity"])
        return F.cross_entropy(logits, y) + 0.1 * terms["activity"]


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_fit_with_loss_terms_ends_as_the_plain_one(tmp_path: Path, mode: Any) -> None:
    strategy = GPipeStrategy([2, 1], chunks=3, activation_checkpointing=mode)

    plain = fitted(tmp_path / "plain", build=Terms)
    piped = fitted(tmp_path / "piped", strategy, build=Terms, devices=2)

    assert_same_weights(piped, plain)
    activity = piped.callback_metrics["activity"]
    torch.testing.assert_close(activity, plain.callback_metrics["activity"])


def test_training_step_that_does_not_collect(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="'activity' must be collected"):
        fitted(
            tmp_path,
            GPipeStrategy([2, 1], chunks=3),
            build=lambda: Classifier(layers=layers()),
            devices=2,
        )


class Features(Classifier):
    """Adds a loss of what a hook has stored."""

    def __init__(self) -> None:
        super().__init__()
        self.features: list[Tensor] = []
        self.layers[4].register_forward_hook(lambda layer, args, y: self.features.append(y))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        loss = loss + torch.cat(self.features).square().mean()
        self.features.clear()
        return loss


@pytest.mark.parametrize("threads", [True, False])
def test_loss_of_what_a_hook_has_stored(tmp_path: Path, threads: bool) -> None:
    strategy = GPipeStrategy([2, 4], chunks=3, activation_checkpointing="never", threads=threads)

    with pytest.raises(RuntimeError, match=r"handed out of its layer: .* write loss_term\("):
        fitted(tmp_path, strategy, build=Features, devices=2)
