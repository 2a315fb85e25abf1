"""What a plan says that a stage keeps for backward is what it keeps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import nn

from benchmarks.harness.keeping import kept
from lightning_gpipe import plan
from lightning_gpipe.core.schedules import ActivationCheckpointing
from tests.support.models import rows
from tests.support.pipes import Pipe
from tests.support.skip_layers import pair

pytestmark = pytest.mark.usefixtures("one_intra_op_thread", "no_collector")

WIDTH, CHUNKS = 3, 4


def saves_its_input() -> list[nn.Module]:
    return [nn.Linear(WIDTH, WIDTH) for _ in range(4)]


def saves_its_output() -> list[nn.Module]:
    return [nn.Tanh(), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Sigmoid()]


def skips() -> list[nn.Module]:
    stash, pop = pair()
    return [stash, nn.Linear(WIDTH, WIDTH), pop, nn.Linear(WIDTH, 2 * WIDTH)]


@pytest.mark.parametrize("mode", ["always", "except_last", "never", 2])
@pytest.mark.parametrize("balance", [[1, 4], [3, 2], [4, 1], [1, 1, 1, 1, 1]], ids=str)
@pytest.mark.parametrize("build", [saves_its_input, saves_its_output, skips])
def test_what_stages_keep(
    build: Callable[[], list[nn.Module]],
    balance: list[int],
    mode: ActivationCheckpointing,
    pipe: Pipe,
) -> None:
    model, x = nn.Sequential(nn.Tanh(), *build()).double(), rows(8, WIDTH)
    pipeline = pipe(model, balance, chunks=CHUNKS, mode=mode, copy=False, threads=False)

    def step() -> None:
        pipeline(x).square().sum().backward()

    step()
    keeping = kept(pipeline, [x], step)
    pipeline.release()
    found = plan(
        model,
        x,
        len(balance),
        balance=balance,
        chunks=CHUNKS,
        activation_checkpointing=mode,
        split_backward=False,  # as the pipeline has it; by measured times, a plan may split some
    )
    stages = found.prediction.stages

    assert keeping.stages == [
        stage.memory.activations + stage.memory.boundaries for stage in stages
    ]
