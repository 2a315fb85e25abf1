"""Whole models over GPUs: what is around the pipeline is on the last device."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe import GPipe
from tests.gpu.models import DEVICES, ON_GPU, assert_same, batch

pytestmark = ON_GPU


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("shift", torch.linspace(-1, 1, 8))

    def forward(self, x: Tensor, *, mask: Tensor, bias: Tensor) -> Tensor:
        return x + self.linear(x).tanh() * mask + bias + self.shift


class Model(nn.Module):
    """Loops over blocks; what they get beside their input is on the device of the first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.bias = nn.Parameter(torch.ones(1, 8))
        self.last = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        mask = x > 0
        x = self.first(x)
        for block in self.blocks:
            x = block(x, mask=mask, bias=self.bias)
        return self.last(x)


@pytest.mark.parametrize("module", ["blocks", ""], ids=["list", "traced"])
@pytest.mark.parametrize("devices", DEVICES)
def test_model(devices: list[str], module: str) -> None:
    torch.manual_seed(0)
    plain = Model().double()
    model = deepcopy(plain)
    n = max(2, len(devices))
    balance = {2: [1, 3], 3: [1, 1, 2], 4: [1] * 4}[n]
    if not module:
        balance = [*balance[:-1], balance[-1] + 2]
    pipeline = GPipe(model, balance, module=module, devices=devices, chunks=3)
    for _ in range(2):
        x, y = batch().requires_grad_(), batch().requires_grad_()

        found, wanted = pipeline(x), plain(y)
        found.square().sum().backward()
        wanted.square().sum().backward()

        assert found.device == torch.device(devices[-1])
        assert_same(found.detach().cpu(), wanted.detach())
        assert_same(x.grad, y.grad)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        assert_same(one.grad.cpu(), other.grad)
    pipeline.close()
