"""Pretrained weights over GPUs: each tensor is read onto the device of its stage."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from lightning_gpipe import GPipe
from lightning_gpipe.core.frontends.pretrained import load_pretrained, parameters_on_meta
from lightning_gpipe.core.frontends.stored import StoredTensor
from tests.gpu.models import DEVICES, ON_GPU, batch

pytestmark = ON_GPU


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x).tanh()
        return x


@pytest.mark.parametrize("devices", DEVICES)
def test_each_tensor_is_read_onto_the_device_of_its_stage(
    devices: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    plain = Model().double()
    save_file(plain.state_dict(), tmp_path / "model.safetensors")
    with parameters_on_meta():
        model = Model().double()
    read: list[tuple[str, torch.device]] = []
    read_into = StoredTensor.read_into

    def recorded(stored: StoredTensor, tensor: Tensor) -> None:
        read.append((stored.name, tensor.device))
        read_into(stored, tensor)

    monkeypatch.setattr(StoredTensor, "read_into", recorded)

    load_pretrained(model, tmp_path)
    assert read == []
    pipeline = GPipe(
        model, [1] * 4 if len(devices) != 3 else [1, 1, 2], module="blocks", devices=devices
    )

    x = batch()
    torch.testing.assert_close(pipeline(x).cpu(), plain(x.cpu()))
    assert len(read) == len(plain.state_dict())
    assert {model.get_parameter(name).device == device for name, device in read} == {True}
    expected = {
        layer: stage.device for stage in pipeline.stages for layer in stage.partition.layers
    }
    assert all(block.weight.device == device for block, device in expected.items())
    pipeline.close()
