"""A model that was spread over devices by hooks runs as a pipeline without them."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe import GPipe, GPipeStrategy
from lightning_gpipe.core.frontends import remove_dispatch_hooks
from tests.support.dispatched import AlignDevicesHook, dispatch
from tests.support.lightning_modules import Classifier, Data, trainer

PARTS = {"first": "cpu", "layers.0": "cpu", "layers.1": "cpu"}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x).tanh()
        return x


@pytest.mark.parametrize("module, balance", [("layers", [1, 1]), (None, [2, 1])])
def test_pipeline_without_the_hooks(module: str | None, balance: list[int]) -> None:
    plain = Model()
    model = deepcopy(plain)
    hooks = dispatch(model, PARTS)

    pipeline = GPipe(model, balance, module=module, devices=["cpu"] * 2, chunks=2)

    x = torch.randn(4, 4)
    torch.testing.assert_close(pipeline(x), plain(x))
    assert [hook.calls for hook in hooks] == [0, 0, 0]
    pipeline.release()
    torch.testing.assert_close(model(x), plain(x))
    assert [set(vars(each)) for each in model.modules()] == [
        set(vars(each)) for each in plain.modules()
    ]


def test_forward_of_the_users_own_stays() -> None:
    model: Any = Model()
    model.first.forward = lambda x: x
    dispatch(model, PARTS)

    remove_dispatch_hooks(model)

    x = torch.ones(4)
    assert model.first(x) is x


def test_weights_that_were_offloaded() -> None:
    model = Model()
    dispatch(model, PARTS | {"layers.1": "meta"})

    with pytest.raises(ValueError, match=r"has offloaded layers\.1\.weight.*load_pretrained"):
        GPipe(model, [1, 1], module="layers", devices=["cpu"] * 2)


def test_hook_that_does_more_than_to_move() -> None:
    class CastingHook(AlignDevicesHook):
        pass

    model = Model()
    dispatch(model, PARTS, CastingHook)

    with pytest.raises(ValueError, match=r"CastingHook on first, .*remove_hook_from_module"):
        GPipe(model, [1, 1], module="layers", devices=["cpu"] * 2)
    assert "_hf_hook" in vars(model.first)


def test_fit(tmp_path: Path) -> None:
    model = Classifier()
    dispatch(model, {"layers.0": "cpu", "layers.2": "cpu", "head": "cpu"})
    made = trainer(tmp_path, GPipeStrategy([2, 4], 4), devices=2, fast_dev_run=True)

    made.fit(model, datamodule=Data())

    assert "_hf_hook" not in vars(model.head)
