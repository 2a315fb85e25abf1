"""A model that from_pretrained(device_map=...) has spread over GPUs, as a pipeline over them."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe import GPipe
from tests.gpu.models import batch
from tests.gpu.trainers import needs
from tests.support.dispatched import dispatch

pytestmark = needs(2)
DEVICES = ["cuda:0", "cuda:1"]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 2)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(x)


@pytest.mark.parametrize("balance, moved", [([1, 2], False), ([2, 1], True)])
def test_model_is_taken_where_it_lies_or_moved(balance: list[int], moved: bool) -> None:
    plain = Model()
    model = deepcopy(plain)
    first, second = DEVICES
    dispatch(model, {"layers.0": first, "layers.1": second, "layers.2": second, "head": second})
    memory = [parameter.data_ptr() for parameter in model.parameters()]

    pipeline = GPipe(model, balance, module="layers", devices=DEVICES, chunks=2)

    if not moved:
        assert [parameter.data_ptr() for parameter in model.parameters()] == memory
    x = batch(6)
    torch.testing.assert_close(pipeline(x).cpu(), plain(x))
    pipeline.close()
