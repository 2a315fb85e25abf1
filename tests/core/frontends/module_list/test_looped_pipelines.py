"""Models that loop over blocks, in pipelines of several stages."""

from __future__ import annotations

import copy

import pytest

from lightning_gpipe.core.pipeline import GPipe
from lightning_gpipe.core.schedules import ActivationCheckpointing
from tests.support.loops import GPT, tokens
from tests.support.models import assert_same_step
from tests.support.pipes import even, every_mode, with_and_without_threads

pytestmark = [every_mode, with_and_without_threads]


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_output_and_gradients(stages: int, mode: ActivationCheckpointing, threads: bool):
    plain = GPT()
    pipeline = GPipe(
        copy.deepcopy(plain),
        even(4, stages),
        module="blocks",
        devices=["cpu"] * stages,
        chunks=3,
        activation_checkpointing=mode,
        threads=threads,
    )
    for rows in (7, 5):
        assert_same_step(pipeline, plain, tokens(rows))
    pipeline.close()
