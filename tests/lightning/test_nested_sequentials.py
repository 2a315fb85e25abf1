"""Layers of nested Sequentials count one by one in a Trainer, too."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelSummary
from torch import nn

from lightning_gpipe import GPipeStrategy
from tests.support.compilation import can_compile, counting
from tests.support.lightning_modules import (
    Classifier,
    assert_same_weights,
    fitted,
    rows,
    six_layers,
)


def nested() -> Classifier:
    layers = list(six_layers())
    groups = [nn.Sequential(*layers[:2]), nn.Sequential(nn.Sequential(*layers[2:4]), *layers[4:])]
    return Classifier(layers=nn.Sequential(*groups))


@pytest.mark.parametrize("balance", ["parameters", [1, 1], [3, 3], ["0.0", "1.0.1"]])
def test_fit(tmp_path: Path, balance: Any) -> None:
    plain = fitted(tmp_path, build=nested)

    pipelined = fitted(tmp_path, GPipeStrategy(balance, chunks=3), build=nested, devices=2)

    assert_same_weights(pipelined, plain)


def test_checkpoint_of_a_balance_by_children(tmp_path: Path) -> None:
    half = fitted(tmp_path, GPipeStrategy([1, 1], 3), build=nested, devices=2, max_epochs=2)
    half.save_checkpoint(tmp_path / "half.ckpt")
    again = partial(fitted, tmp_path, build=nested, ckpt_path=tmp_path / "half.ckpt")

    assert_same_weights(again(GPipeStrategy([3, 3], 3), devices=2), again())


@pytest.mark.skipif(not can_compile(), reason="needs modes that torch.compile may ignore")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor", "ignore:Guards may run")
def test_layers_in_groups_are_compiled(tmp_path: Path) -> None:
    graphs: list[int] = []
    strategy = GPipeStrategy([3, 3], 3, compile={"backend": counting(graphs)})

    fitted(tmp_path, strategy, build=nested, devices=2)

    assert graphs


def test_loop_over_the_layers_of_groups(tmp_path: Path) -> None:
    class Looping(Classifier):
        def forward(self, x: Any) -> Any:
            for group in self.layers:
                x = group(x)
            return self.head(x)

    build = lambda: Looping(layers=nested().layers)  # noqa: E731

    with pytest.raises(RuntimeError, match=r"Looping\.layers"):
        fitted(tmp_path, GPipeStrategy([3, 3], 3), build=build, devices=2, num_sanity_val_steps=0)


def test_summary_of_all_modules(tmp_path: Path) -> None:
    def build() -> Classifier:
        model = nested()
        model.example_input_array = rows(5, seed=3).tensors[0]
        return model

    strategy = GPipeStrategy([3, 3], 3)
    with pytest.warns(UserWarning, match=r"got hooks on '0', '1', '1.0' since setup"):
        model = fitted(
            tmp_path, strategy, build=build, devices=2, callbacks=[ModelSummary(max_depth=-1)]
        )

    assert_same_weights(model, fitted(tmp_path, build=nested))
