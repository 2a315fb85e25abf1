"""The large transformer is planned, and nothing of it is computed."""

import pytest
import torch

from benchmarks.models.billions import Billions
from lightning_gpipe import Place, plan
from lightning_gpipe.core.planner import NoPlan


def test_each_block_is_a_stage() -> None:
    model = Billions(blocks=30, width=288, rows=64)
    model.configure_model()

    places = [Place(memory=2**30)] * 32
    found = plan(
        model.layers,
        model.example_input_array,
        places,
        optimizer=torch.optim.AdamW,
        schedule="1f1b",
    )

    assert found.settings.balance == (1,) * 32
    assert found.prediction.unit == "FLOP"
    recomputed = found.settings.activation_checkpointing
    assert isinstance(recomputed, list)
    stages = zip(recomputed, found.prediction.stages, strict=True)
    kinds = {(number, stage.time) for number, stage in [*stages][1:-1]}
    assert len(kinds) == len(set(recomputed[1:-1])) <= 2


def test_logits_of_all_micro_batches_do_not_fit() -> None:
    model = Billions(blocks=2, width=288, rows=64)
    model.configure_model()

    with pytest.raises(NoPlan, match="schedule='1f1b'.*a loss of its own") as caught:
        plan(model.layers, model.example_input_array, [Place(memory=2**31)] * 4)

    *_, last = caught.value.nearest.stages
    assert last.memory.outputs == 64 * 2048 * 32_000 * 4
