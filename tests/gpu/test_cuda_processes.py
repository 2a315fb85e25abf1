"""Processes with GPUs of their own: the numbers of one process, and no race between streams.

Their tensors go over the memory of the host, or straight from GPU to GPU.
"""

import os
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe import GPipe
from lightning_gpipe.core.schedules import ActivationCheckpointing, ByMicroBatch, is_folded
from tests.gpu.channels import Ways, needs_nccl, recorded_ways
from tests.gpu.models import ON_GPU
from tests.support.models import rows
from tests.support.processes import Owners, assert_equal, processes, values
from tests.support.ranks import NCCL, Pool
from tests.support.skip_layers import pair

pytestmark = [
    *ON_GPU,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.usefixtures("one_intra_op_thread"),
]


class Run(NamedTuple):
    """What came of three steps in one process.

    Attributes:
        numbers: The losses, and what else all processes know.
        state: The state of its own stages.
        ways: How the tensors went that it has sent.
        hazards: Those in this process, on simulated GPUs.
    """

    numbers: Any
    state: dict[str, Tensor]
    ways: Ways
    hazards: list[str]


def layers(*, drawing: bool) -> nn.Sequential:
    """Eight layers with a skip, a buffer, a shared weight, and dropout if ``drawing``."""
    torch.manual_seed(4)
    stash, pop = pair()
    first, last = nn.Linear(3, 3), nn.Linear(3, 3)
    last.weight = first.weight
    dropout = nn.Dropout(0.5 if drawing else 0.0)
    middle = [stash, nn.BatchNorm1d(3), nn.Linear(3, 3), dropout, nn.Tanh(), pop]
    return nn.Sequential(first, *middle, last).double()


def train(
    devices: list[str],
    mode: ActivationCheckpointing,
    owners: Owners | None,
    backend: str,
    *,
    drawing: bool,
) -> Run:
    """Three steps with one loss."""
    module = layers(drawing=drawing)
    pipeline = GPipe(
        module,
        [8 // len(devices)] * len(devices),
        devices=devices,
        chunks=3,
        activation_checkpointing=mode,
        **processes(owners, backend),
    )
    optimizer = torch.optim.SGD(pipeline.parameters(), 0.1)
    found = []
    with recorded_ways() as ways:
        for k in range(3):
            x = rows(7, seed=k).detach().requires_grad_()
            y = pipeline(x)
            loss = y.square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append((y.detach().cpu(), loss.detach().cpu(), x.grad))
    numbers = found, torch.rand(())
    return end(pipeline, numbers, ways, owners)


def step(
    devices: list[str],
    schedule: ByMicroBatch,
    stages: int,
    mode: ActivationCheckpointing,
    owners: Owners | None,
    backend: str,
) -> Run:
    """Three steps with a loss for each micro-batch."""
    pipeline = GPipe(
        layers(drawing=False),
        [8 // stages] * stages,
        devices=devices,
        chunks=4,
        activation_checkpointing=mode,
        folded=is_folded(schedule, len(devices)),
        **processes(owners, backend),
    )
    optimizer = torch.optim.SGD(pipeline.parameters(), 0.1)
    losses = []
    with recorded_ways() as ways:
        for k in range(3):
            outcome = pipeline.by_micro_batch(
                lambda x: pipeline(x).square().mean(), rows(8, seed=k), schedule=schedule
            )
            assert outcome.loss is not None
            optimizer.zero_grad()
            outcome.loss.backward()
            optimizer.step()
            losses.append(outcome.loss.detach().cpu())
    return end(pipeline, losses, ways, owners)


def end(pipeline: GPipe, numbers: Any, ways: Ways, owners: Owners | None) -> Run:
    """Close the pipeline, and return what came of it."""
    pipeline.close()
    state = {name: x.cpu() for name, x in values(pipeline.state_dict()).items()}
    return Run(numbers, state, ways, [] if owners is None else hazards())


def hazards() -> list[str]:
    """Those in this process."""
    if "SIMULATED_GPUS" not in os.environ:
        return []
    from tests.simcuda.plugin import take_hazards  # which starts them

    return take_hazards()


def assert_equal_and_sound(found: list[Run], expected: Run, backend: str) -> None:
    """Equal to the bit to one process, without a race, and all on the way that the backend has."""
    for run in found:
        assert_equal(run.numbers, expected.numbers)
        assert_equal(run.state, {name: expected.state[name] for name in run.state})
        assert run.ways
        assert all((way is not None) == (backend == NCCL) for way in run.ways)
        assert not run.hazards


TWO = ((0, 1), ["cuda:0", "cuda:1"])
TWO_EACH = ((0, 0, 1, 1), ["cuda:0", "cuda:1", "cuda:0", "cuda:1"])
IN_TURN = ((0, 1, 0, 1), ["cuda:0", "cuda:1", "cuda:2", "cuda:3"])
ONE_EACH = ((0, 1, 2, 3), ["cuda:0", "cuda:1", "cuda:2", "cuda:3"])
four_gpus = pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs")
on_gpus = pytest.mark.parametrize(
    "owners, devices",
    [
        pytest.param(*TWO, id="one each"),
        pytest.param(*TWO_EACH, marks=four_gpus, id="two each"),
        pytest.param(*IN_TURN, marks=four_gpus, id="two each, in turn"),
        pytest.param(*ONE_EACH, marks=four_gpus, id="four processes"),
    ],
)
both_ways = pytest.mark.parametrize(
    "backend", [pytest.param("gloo", id="gloo"), pytest.param(NCCL, marks=needs_nccl, id="nccl")]
)


@pytest.mark.parametrize("mode", ["always", "never"])
@on_gpus
@both_ways
def test_same_numbers_as_in_one_process(
    four_ranks: Pool,
    owners: Owners,
    devices: list[str],
    mode: ActivationCheckpointing,
    backend: str,
) -> None:
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        every = [f"cuda:{k}" for k in range(len(devices))]
        expected = train(every, mode, None, backend, drawing=False)

    run = partial(train, devices, mode, owners, backend, drawing=False)
    found = four_ranks.run(run, among=len(set(owners)))

    assert_equal_and_sound(found, expected, backend)


@pytest.mark.parametrize(
    "schedule, per_device, mode",
    [
        pytest.param("1f1b", 1, "never", id="1f1b"),
        pytest.param("1f1b", 1, "always", id="1f1b, recomputed"),
        pytest.param("1f1b", 2, "never", id="interleaved"),
        pytest.param("zero_bubble", 1, "never", id="zero bubble"),
        pytest.param("zero_bubble_v", 2, "never", id="zero bubble, V"),
        pytest.param("v_half", 2, "never", id="V-half"),
        pytest.param("v_min", 2, "never", id="V-min"),
    ],
)
@on_gpus
@both_ways
def test_same_numbers_with_a_loss_for_each_micro_batch(
    four_ranks: Pool,
    owners: Owners,
    devices: list[str],
    schedule: ByMicroBatch,
    per_device: int,
    mode: ActivationCheckpointing,
    backend: str,
) -> None:
    stages = per_device * len(devices)
    every = [f"cuda:{k}" for k in range(len(devices))]
    expected = step(every, schedule, stages, mode, None, backend)

    run = partial(step, devices, schedule, stages, mode, owners, backend)
    found = four_ranks.run(run, among=len(set(owners)))

    assert_equal_and_sound(found, expected, backend)


@both_ways
def test_dropout_on_gpus_leaves_all_processes_in_one_state(four_ranks: Pool, backend: str) -> None:
    owners, devices = TWO_EACH
    run = partial(train, devices, "always", owners, backend, drawing=True)
    one, other = four_ranks.run(run, among=2)

    assert_equal(one.numbers, other.numbers)
    assert not [*one.hazards, *other.hazards]
