"""verify() on a GPU: the plain run crosses devices as the pipeline does."""

import pytest
import torch
from torch import nn

from lightning_gpipe import PaddedSequences, verify
from tests.gpu.models import ON_GPU
from tests.support.models import Fork, Join, Through, rows
from tests.support.pipes import Pipe

pytestmark = ON_GPU


@pytest.mark.parametrize("devices", [["cuda:0", "cuda:0"], ["cpu", "cuda:0"], ["cuda:0", "cpu"]])
def test_sound_model(devices: list[str], pipe: Pipe) -> None:
    module = nn.Sequential(Fork(3), Through(nn.Linear(3, 3)), Join(), nn.Tanh()).double()

    assert verify(pipe(module, devices=devices), rows(7)).difference is None


def test_padded_sequences(pipe: Pipe) -> None:
    class Double(nn.Module):
        def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return {**batch, "x": batch["x"] * 2}

    trim = PaddedSequences("lengths", trim=["x"], pad_outputs=["x"])
    pipeline = pipe(
        nn.Sequential(Double(), Double()), devices=["cuda:0", "cuda:0"], microbatching=trim
    )
    batch = {"x": torch.ones(5, 4, requires_grad=True), "lengths": torch.tensor([1, 4, 2, 3, 3])}

    assert verify(pipeline, batch).difference is None
