"""Collectives between simulated GPUs: the numbers of Gloo's, and the hazards of NCCL's."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional

from tests.gpu.test_cuda_processes import hazards
from tests.support.ranks import Pool, group_of

pytestmark = pytest.mark.skipif(
    "SIMULATED_GPUS" not in os.environ or torch.cuda.device_count() < 2,
    reason="needs two simulated GPUs",
)


def own(device: str) -> Tensor:
    """Four numbers of this rank."""
    return torch.arange(4.0, device=device) + 10 * dist.get_rank()


def broadcast(x: Tensor) -> Tensor:
    dist.broadcast(x, 1)
    return x


def reduce(x: Tensor) -> Tensor:
    dist.reduce(x, 0)
    return x if dist.get_rank() == 0 else torch.zeros_like(x)


def all_reduce(x: Tensor) -> Tensor:
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
    return x


def average(x: Tensor) -> Tensor:
    x = x.long() + 2 if x.is_cuda else x + 2
    dist.all_reduce(x, op=dist.ReduceOp.AVG)
    return x.float()


def all_gather(x: Tensor) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(2)]
    dist.all_gather(parts, x)
    return torch.cat(parts)


def all_gather_into(x: Tensor) -> Tensor:
    result = torch.empty(8, device=x.device)
    dist.all_gather_into_tensor(result, x)
    return result


def reduce_scatter(x: Tensor) -> Tensor:
    result = torch.empty(2, device=x.device)
    dist.reduce_scatter_tensor(result, x)
    return result


def scatter(x: Tensor) -> Tensor:
    result = torch.empty_like(x)
    dist.scatter(result, [x, 2 * x] if dist.get_rank() == 1 else None, 1)
    return result


def group() -> dist.ProcessGroup:
    return group_of(2)


def functional_sum(x: Tensor) -> Tensor:
    return functional.all_reduce(x, "sum", group()) + 0


def functional_parts(x: Tensor) -> Tensor:
    return functional.reduce_scatter_tensor(x, "sum", 0, group()) + 0


def functional_whole(x: Tensor) -> Tensor:
    return functional.all_gather_tensor(x, 0, group()) + 0


COLLECTIVES = [
    broadcast,
    reduce,
    all_reduce,
    average,
    all_gather,
    all_gather_into,
    reduce_scatter,
    scatter,
    functional_sum,
    functional_parts,
    functional_whole,
]


def run(collective: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, list[str]]:
    """The result on simulated GPUs and on the host, and the hazards."""
    found = collective(own(f"cuda:{dist.get_rank()}"))
    return found.cpu(), collective(own("cpu")), hazards()


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_numbers_are_those_of_the_host(two_ranks: Pool, collective: Any) -> None:
    for found, expected, races in two_ranks.run(run, collective):
        assert torch.equal(found, expected) and not races


def read_at_once() -> list[str]:
    x = own(f"cuda:{dist.get_rank()}")
    work: Any = dist.all_reduce(x, async_op=True)
    x.sum()
    found = hazards()
    work.wait()
    x.sum()
    assert not hazards()
    return found


def edit_meanwhile() -> list[str]:
    x = own(f"cuda:{dist.get_rank()}")
    parts = [torch.empty_like(x) for _ in range(2)]
    work: Any = dist.all_gather(parts, x, async_op=True)
    x.zero_()
    found = hazards()
    work.wait()
    return found


@pytest.mark.parametrize("mistake", [read_at_once, edit_meanwhile])
def test_what_is_not_waited_for_is_a_hazard(two_ranks: Pool, mistake: Any) -> None:
    for found in two_ranks.run(mistake):
        assert found
