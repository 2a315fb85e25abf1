"""Transparency: quantised weights keep their class and scales; their adapters train."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from lightning_gpipe import GPipe
from tests.support.models import a_loss, assert_same, gradients
from tests.support.pipes import every_mode
from tests.support.quantised import Adapted, Loop, OfTwo, TakesScale, WithScale, sequential

WIDTH = 6


@every_mode
@pytest.mark.parametrize("kind", [WithScale, TakesScale, OfTwo])
@pytest.mark.parametrize("made", [sequential, Loop])
def test_adapters_on_quantised_layers(
    made: Callable[[nn.Sequential], nn.Module], kind: Callable[[nn.Linear], nn.Module], mode: Any
) -> None:
    torch.manual_seed(0)
    layers = [Adapted(kind(nn.Linear(WIDTH, WIDTH).double()), WIDTH).double() for _ in range(4)]
    plain = made(nn.Sequential(*layers))
    model = deepcopy(plain)
    weights = {name: p for name, p in model.named_parameters() if name.endswith("base.weight")}
    kinds = {name: type(weight) for name, weight in weights.items()}
    module = "layers" if made is Loop else None
    pipeline = GPipe(
        model, [1, 3], module=module, devices=["cpu"] * 2, chunks=3, activation_checkpointing=mode
    )

    for seed in range(3):
        x = torch.randn(7, WIDTH, generator=torch.Generator().manual_seed(seed)).double()
        y = x.clone().requires_grad_()
        x.requires_grad_()
        plain.zero_grad()
        model.zero_grad()
        a_loss(pipeline(x)).backward()
        a_loss(plain(y)).backward()
        assert_same(gradients(model), gradients(plain))
        torch.testing.assert_close(x.grad, y.grad)

    found = {name: p for name, p in model.named_parameters() if name.endswith("base.weight")}
    assert all(found[name] is weight for name, weight in weights.items())
    assert {name: type(weight) for name, weight in found.items()} == kinds
    pipeline.close()
