"""Processes with GPUs of their own: the numbers of one process, and no race between streams."""

import os
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe import GPipe
from lightning_gpipe.core.schedules import ActivationCheckpointing, ByMicroBatch
from tests.gpu.models import ON_GPU
from tests.support.models import rows
from tests.support.processes import Owners, assert_equal, processes, values
from tests.support.ranks import Pool
from tests.support.skip_layers import pair

pytestmark = [
    *ON_GPU,
    pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs"),
    pytest.mark.usefixtures("one_intra_op_thread"),
]


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
    devices: list[str], mode: ActivationCheckpointing, owners: Owners | None, *, drawing: bool
) -> tuple[Any, dict[str, Tensor], Tensor, list[str]]:
    """What came of three steps, the state, a random number, and the hazards."""
    module = layers(drawing=drawing)
    pipeline = GPipe(
        module,
        [2, 2, 2, 2],
        devices=devices,
        chunks=3,
        activation_checkpointing=mode,
        **processes(owners),
    )
    optimizer = torch.optim.SGD(pipeline.parameters(), 0.1)
    found = []
    for k in range(3):
        x = rows(7, seed=k).detach().requires_grad_()
        y = pipeline(x)
        loss = y.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append((y.detach().cpu(), loss.detach().cpu(), x.grad))
    pipeline.close()
    state = {name: x.cpu() for name, x in values(pipeline.state_dict()).items()}
    return found, state, torch.rand(()), [] if owners is None else hazards()


def step(
    devices: list[str], schedule: ByMicroBatch, owners: Owners | None
) -> tuple[list[Tensor], dict[str, Tensor], list[str]]:
    """The losses of three steps with a loss for each micro-batch, the state, and the hazards."""
    module = layers(drawing=False)
    folded = schedule == "zero_bubble_v"
    pipeline = GPipe(
        module,
        [1] * 8 if folded else [2] * 4,
        devices=devices,
        chunks=4,
        activation_checkpointing="never",
        folded=folded,
        **processes(owners),
    )
    optimizer = torch.optim.SGD(pipeline.parameters(), 0.1)
    losses = []
    for k in range(3):
        outcome = pipeline.by_micro_batch(
            lambda x: pipeline(x).square().mean(), rows(8, seed=k), schedule=schedule
        )
        assert outcome.loss is not None
        optimizer.zero_grad()
        outcome.loss.backward()
        optimizer.step()
        losses.append(outcome.loss.detach().cpu())
    pipeline.close()
    state = {name: x.cpu() for name, x in values(pipeline.state_dict()).items()}
    return losses, state, [] if owners is None else hazards()


def hazards() -> list[str]:
    """Those in this process."""
    if "SIMULATED_GPUS" not in os.environ:
        return []
    from tests.simcuda.plugin import take_hazards  # which starts them

    return take_hazards()


TWO_EACH = ((0, 0, 1, 1), ["cuda:0", "cuda:1", "cuda:0", "cuda:1"])
IN_TURN = ((0, 1, 0, 1), ["cuda:0", "cuda:1", "cuda:2", "cuda:3"])
ONE_EACH = ((0, 1, 2, 3), ["cuda:0", "cuda:1", "cuda:2", "cuda:3"])


@pytest.mark.parametrize("mode", ["always", "never"])
@pytest.mark.parametrize("owners, devices", [TWO_EACH, IN_TURN, ONE_EACH], ids=str)
def test_same_numbers_as_in_one_process(
    four_ranks: Pool, owners: Owners, devices: list[str], mode: ActivationCheckpointing
) -> None:
    with torch.random.fork_rng(devices=range(4)):
        every = [f"cuda:{k}" for k in range(4)]
        expected, state, number, _ = train(every, mode, None, drawing=False)

    run = partial(train, devices, mode, owners, drawing=False)
    for found, own, other, races in four_ranks.run(run, among=len(set(owners))):
        assert_equal((found, other), (expected, number))
        assert_equal(own, {name: state[name] for name in own})
        assert not races


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble", "zero_bubble_v"])
@pytest.mark.parametrize("owners, devices", [TWO_EACH, IN_TURN, ONE_EACH], ids=str)
def test_same_numbers_with_a_loss_for_each_micro_batch(
    four_ranks: Pool, owners: Owners, devices: list[str], schedule: ByMicroBatch
) -> None:
    losses, state, _ = step([f"cuda:{k}" for k in range(4)], schedule, None)

    run = partial(step, devices, schedule, owners)
    for found, own, races in four_ranks.run(run, among=len(set(owners))):
        assert_equal(found, losses)
        assert_equal(own, {name: state[name] for name in own})
        assert not races


def test_dropout_on_gpus_leaves_all_processes_in_one_state(four_ranks: Pool) -> None:
    owners, devices = TWO_EACH
    one, other = four_ranks.run(partial(train, devices, "always", owners, drawing=True), among=2)

    assert_equal((one[0], one[2]), (other[0], other[2]))
    assert not [*one[3], *other[3]]
