"""Layers are measured on a GPU, one at a time, while the model stays where it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_gpipe import GPipe, balance_by_memory, profile
from tests.gpu.models import DEVICES, ON_GPU, batch, layers
from tests.support.clocks import Between, Looped

pytestmark = [*ON_GPU]
KINDS: dict[str, Any] = {
    "sequential": (lambda *layers: nn.Sequential(*layers), None),
    "blocks": (Looped, "blocks"),
    "traced": (Between, None),
}


@pytest.mark.parametrize("kind", KINDS)
def test_model_stays_on_the_cpu(kind: str) -> None:
    build, path = KINDS[kind]
    model = build(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 4))
    x = torch.linspace(-1, 1, 32).reshape(8, 4)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.cuda.get_rng_state(0)

    costs = profile(model, x, module=path, device="cuda:0", chunks=2)

    assert (costs.device, costs.unit, costs.rows) == ("cuda:0", "s", 4)
    assert costs.layers[0].saved.at(4) == 4 * 4 * 4
    after = model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert all(tensor.device.type == "cpu" for tensor in after.values())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.cuda.get_rng_state(0), state)


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("kind", ["time", "memory"])
def test_pipeline_with_a_measured_balance(devices: list[str], kind: str) -> None:
    model, x = layers(), batch()

    piped = GPipe(model, kind, devices=devices, chunks=2, sample=x, optimizer=torch.optim.Adam)

    assert sum(piped.balance) == len(model) and len(piped.balance) == len(devices)
    piped(x.to(devices[0])).sum().backward()
    piped.close()


def test_memory_is_the_same_on_the_cpu() -> None:
    model, x = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6))), torch.rand(8, 4)

    on_gpu = balance_by_memory(model, 3, x, device="cuda:0", optimizer=torch.optim.Adam)

    assert on_gpu == balance_by_memory(model, 3, x, optimizer=torch.optim.Adam)
