"""An optimizer of shards and whole tensors steps them one by one.

On GPUs PyTorch steps all parameters of a group by functions that refuse both together: a fit whose
blocks were divided by ``parallelize_module``, and whose head was not, ended in its first step. That
is also tested on simulated GPUs, in `test_cuda_tensor_parallel.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lightning_gpipe.core.run.micro_batch_losses.losses import multiply
from lightning_gpipe.strategy.replicas.stage_shards import step_one_by_one
from tests.support.processes import said
from tests.support.ranks import Pool, group_of


def parameters() -> list[nn.Parameter]:
    """A shard and a whole tensor, with gradients."""
    mesh = DeviceMesh.from_group(group_of(2), "cpu")
    shard = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    both = [shard, nn.Parameter(torch.ones(4))]
    for each in both:
        each.grad = torch.ones_like(each)
    return both


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def step(kind: Any, options: dict[str, Any], divided: bool) -> tuple[str, list[Tensor], Any]:
    """The error of a step, the values after it, and the option in the step and later."""
    both = parameters()
    optimizer = kind(both if divided else both[1:], lr=0.5, **options)
    handles = step_one_by_one(optimizer)
    used: list[Any] = []
    optimizer.register_step_pre_hook(lambda *_: used.append(optimizer.param_groups[0]["foreach"]))
    error = said(optimizer.step)
    for handle in handles:
        handle.remove()
    return error, [whole(each) for each in both], (used, optimizer.param_groups[0]["foreach"])


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_step(two_ranks: Pool, kind: Any) -> None:
    for error, values, options in two_ranks.run(step, kind, {}, True):
        assert error == "none"
        assert torch.equal(values[0], values[1]) and values[0][0] < 1
        assert options == ([False], None)


@pytest.mark.parametrize("options, divided", [({"foreach": False}, True), ({}, False)])
def test_option_stays(two_ranks: Pool, options: dict[str, Any], divided: bool) -> None:
    for _, _, (used, after) in two_ranks.run(step, torch.optim.SGD, options, divided):
        assert used == [options.get("foreach")] == [after]


def test_option_of_the_user(two_ranks: Pool) -> None:
    for error, *_ in two_ranks.run(step, torch.optim.SGD, {"foreach": True}, True):
        assert "got mixed torch.Tensor and DTensor" in error


def scaled() -> list[Tensor]:
    gradients = [each.detach() for each in parameters()]
    multiply(gradients, torch.tensor(0.5))
    return [whole(each) for each in gradients]


def test_gradients_of_both_are_scaled(two_ranks: Pool) -> None:
    """A loss for each micro-batch, and a gradient of the loss that is not one, or is on a GPU."""
    for found in two_ranks.run(scaled):
        assert all(torch.equal(each, torch.full((4,), 0.5)) for each in found)
