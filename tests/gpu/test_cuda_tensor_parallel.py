"""Stages of two GPUs each, which divide their layers: the numbers of one process, and no race."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.gpu.models import ON_GPU
from tests.gpu.test_cuda_processes import hazards
from tests.lightning import test_tensor_parallel
from tests.lightning.test_tensor_parallel import close, same_checkpoints
from tests.support.ranks import NCCL, Pool

pytestmark = [
    *ON_GPU,
    pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs"),
    pytest.mark.usefixtures("one_intra_op_thread"),
]

SIMULATED = "SIMULATED_GPUS" in os.environ
ALWAYS = {"activation_checkpointing": "always", "split_backward": True}


def fit(root: Path, *given: dict[str, Any], waits: bool = True) -> tuple[dict[str, Any], list[str]]:
    """What came of a fit over four GPUs in this process, and its hazards."""
    strategy, model, options = given
    strategy = {**strategy, "process_group_backend": "gloo" if SIMULATED else NCCL}
    with nullcontext() if waits else without_waits():
        options = {**options, "accelerator": "gpu"}
        found = test_tensor_parallel.fit(root, strategy, model, options)
    return found, hazards()


def without_waits() -> AbstractContextManager[Any]:
    """Let streams go on before collectives have ended."""
    from tests.simcuda.collectives import Collective  # for which GPUs are simulated

    return patch.object(Collective, "wait", lambda *_: True)


@pytest.mark.parametrize(
    "strategy, model, options",
    [
        ({}, {"by_sequence": True}, {"gradient_clip_val": 0.05}),
        ({"schedule": "1f1b"}, {"optimizer": "adam"}, {"accumulate_grad_batches": 2}),
        ({"schedule": "zero_bubble"}, {"by_sequence": True}, {}),
        ({"schedule": "zero_bubble_v", "balance": [1] * 4}, {"blocks": 4}, {}),
        (ALWAYS, {"by_sequence": True}, {"gradient_clip_val": 0.05}),
        ({"schedule": "1f1b", "balance": [2, 2]}, {"kind": "tied"}, {"gradient_clip_val": 0.05}),
        (
            {"replicas": 2, "balance": [2]},
            {},
            {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2},
        ),
    ],
    ids=["fill-drain", "1f1b", "zero-bubble", "V", "recomputed", "tied", "replicas"],
)
def test_same_numbers_as_one_process(
    tmp_path: Path, four_ranks: Pool, strategy: Any, model: Any, options: Any
) -> None:
    with torch.random.fork_rng(devices=[]):
        expected = test_tensor_parallel.fit(tmp_path / "plain", None, model, options)

    for found, races in four_ranks.run(fit, tmp_path / "four", strategy, model, options):
        assert not races
        close(found["val_loss"], expected["val_loss"])
        if "replicas" not in strategy:  # else the loss is that of a replica
            close(found["seen"], expected["seen"])
    same_checkpoints(tmp_path / "four", tmp_path / "plain")


@pytest.mark.skipif(not SIMULATED, reason="a GPU has no clocks")
def test_collectives_that_are_not_waited_for(tmp_path: Path, four_ranks: Pool) -> None:
    run = partial(fit, waits=False)

    for _, races in four_ranks.run(run, tmp_path, {}, {}, {}):
        assert races
