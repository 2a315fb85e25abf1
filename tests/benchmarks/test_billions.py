"""The large transformer is planned, and nothing of it is computed."""

import torch

from benchmarks.models.billions import Billions
from lightning_gpipe import Place, plan


def test_each_block_is_a_stage() -> None:
    model = Billions(blocks=30, width=288, rows=64)
    model.configure_model()

    places = [Place(memory=2**30)] * 32
    found = plan(model.layers, model.example_input_array, places, optimizer=torch.optim.AdamW)

    assert found.settings.balance == (1,) * 32
    assert found.prediction.unit == "FLOP"
    assert len({stage.time for stage in found.prediction.stages[1:-1]}) == 1
