"""Whole models over GPUs: what is around the pipeline is on the last device, or on the first."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe import GPipe, GPipeStrategy, verify
from tests.gpu.models import DEVICES, ON_GPU, assert_same, batch
from tests.gpu.trainers import Deep, on_many_gpus, places, plain
from tests.support.lightning_modules import fitted, weights
from tests.support.two_stacks import Translator

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


@pytest.mark.parametrize("around", ["last", "first"])
@pytest.mark.parametrize("module", ["blocks", ""], ids=["list", "traced"])
@pytest.mark.parametrize("devices", DEVICES)
def test_model(devices: list[str], module: str, around: Any) -> None:
    torch.manual_seed(0)
    plain = Model().double()
    model = deepcopy(plain)
    n = max(2, len(devices))
    balance = {2: [1, 3], 3: [1, 1, 2], 4: [1] * 4}[n]
    if not module:
        balance = [*balance[:-1], balance[-1] + 2]
    pipeline = GPipe(model, balance, module=module, devices=devices, chunks=3, around=around)
    outside = torch.device(devices[-1 if around == "last" else 0])
    for _ in range(2):
        x, y = batch().requires_grad_(), batch().requires_grad_()

        found, wanted = pipeline(x), plain(y)
        found.square().sum().backward()
        wanted.square().sum().backward()

        assert found.device == outside
        assert_same(found.detach().cpu(), wanted.detach())
        assert_same(x.grad, y.grad)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        assert_same(one.grad.cpu(), other.grad)
    parity = verify(pipeline, batch())
    parity.check()
    assert parity.of_programs
    if len(set(devices)) > 1:
        for recorded in (pipeline, model):
            with pytest.raises(RuntimeError, match="must be on one device: got .*Record a copy"):
                torch.export.export(recorded, (batch(),), strict=False)
    pipeline.close()


@pytest.mark.parametrize("build", [Translator, Deep])
@on_many_gpus
def test_around_a_fit_is_the_first_device(tmp_path: Path, gpus: int, build: Any) -> None:
    one = plain(tmp_path, build=build)
    paths = ["layers.encoder", "layers.decoder"] if build is Translator else "layers"
    balance: Any = [[1, 2], [3, 1]] if build is Translator else "parameters"
    seen: dict[str, torch.device] = {}

    class Looks(build):
        def on_train_end(self) -> None:
            seen.update(places(self))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            assert batch[0].device == torch.device("cuda", 0)
            return super().training_step(batch, batch_idx)

    strategy = GPipeStrategy(balance, 3, module=paths, around="first")
    gpus = 2 if build is Translator else gpus
    many = fitted(tmp_path, strategy, build=Looks, accelerator="gpu", devices=gpus)

    torch.testing.assert_close(weights(many), weights(one), rtol=1e-9, atol=1e-11)
    around = {device for name, device in seen.items() if name.startswith(("head", "layers.enter"))}
    assert around == {torch.device("cuda", 0)}
    assert len(set(seen.values())) == gpus
