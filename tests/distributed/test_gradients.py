"""Gradients and scales are the same in all processes, of which each has some parameters."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import nn

from lightning_gpipe.distributed.gradients import SameParameters
from lightning_gpipe.distributed.group import Group
from tests.support.ranks import Pool, Ranks

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


def scaled(infinite: bool) -> tuple[list[float], float]:
    """A parameter after a scaled step, which only rank 0 has a gradient for; and the next scale."""
    group = Group(timedelta(seconds=20))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    together = SameParameters(group, [], MixedPrecision("16-mixed", "cpu", scaler))
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], 0.5)
    loss = scaler.scale(parameter.sum() * (math.inf if infinite else 1.0))
    if group.rank == 0:
        loss.backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    together.release()
    assert "_unscale_grads_" not in vars(scaler)
    return parameter.tolist(), scaler.get_scale()


def test_scaler_where_only_one_process_has_gradients(two_ranks: Pool) -> None:
    assert two_ranks.run(scaled, False) == [([0.5, 0.5], 4.0), ([1.0, 1.0], 4.0)]
    assert two_ranks.run(scaled, True) == [([1.0, 1.0], 2.0)] * 2


def clipped() -> tuple[list[float], list[float]]:
    """Gradients clipped by norm and by value in a process of which only rank 0 has any."""
    plugin = Precision()
    group = Group(timedelta(seconds=20))
    together = SameParameters(group, [], plugin)
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter])
    found = []
    for algorithm in GradClipAlgorithmType:
        parameter.grad = torch.tensor([3.0, 4.0]) if group.rank == 0 else None
        plugin.clip_gradients(optimizer, 2.0, algorithm)
        found.append([] if parameter.grad is None else parameter.grad.tolist())
    together.release()
    by_value, by_norm = found
    return by_value, by_norm


def test_clipping_where_only_one_process_has_gradients(two_ranks: Pool) -> None:
    (by_value, by_norm), other = two_ranks.run(clipped)

    assert by_value == [2.0, 2.0]
    assert by_norm == pytest.approx([1.2, 1.6])
    assert other == ([], [])


def clipped_by_hand() -> float:
    """Clip a parameter while each process has the gradients of some, and afterwards."""
    group = Group(timedelta(seconds=20))
    together = SameParameters(group, [], Precision(), everyone=group)
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    with pytest.raises(RuntimeError, match="with 1 parameters in a process that has 1 of their"):
        torch.nn.utils.clip_grad_norm_([parameter], 2.0)
    together.release()
    return float(torch.nn.utils.clip_grad_norm_([parameter], 2.0))


def test_clipping_by_hand_where_gradients_are_divided(two_ranks: Pool) -> None:
    assert two_ranks.run(clipped_by_hand) == [5.0, 5.0]


def equalised() -> tuple[list[float], list[float]]:
    """Values and gradients that differ between processes, made the same."""
    group = Group(timedelta(seconds=20))
    parameter = nn.Parameter(torch.full((2, 3), float(group.rank)).t())
    parameter.grad = torch.rand(3, 2, generator=torch.Generator().manual_seed(group.rank))
    together = SameParameters(group, [parameter], Precision())
    together.equalise()
    return parameter.flatten().tolist(), parameter.grad.flatten().tolist()


def test_parameters_that_every_process_has(two_ranks: Pool) -> None:
    gradient = torch.rand(6, generator=torch.Generator().manual_seed(0)).tolist()

    assert two_ranks.run(equalised) == [([0.0] * 6, gradient)] * 2


def messages_of_none() -> int:
    """The messages of a process after a backward, where no parameter is in all processes."""
    group = Group(timedelta(seconds=20))
    together = SameParameters(group, [], Precision())
    with patch.object(dist, "isend", wraps=dist.isend) as send:
        together.equalise()
    return send.call_count


def test_no_parameter_that_every_process_has(two_ranks: Pool) -> None:
    """As with shares of gradients in replicas of one process each, which once met all the same."""
    assert two_ranks.run(messages_of_none) == [0, 0]


# What is sent when they begin.

NUMBERS = 2**14  # of a parameter
PARAMETERS = 40


def begun(different: int) -> tuple[list[int], list[float]]:
    """The bytes of each message of a process, and the values of its parameters.

    The first ones are ``different`` in each process.
    """
    group = Group(timedelta(seconds=20))
    dtypes = torch.float32, torch.float64
    parameters = [
        nn.Parameter(torch.full((NUMBERS,), float(k), dtype=dtypes[k % 2]))
        for k in range(PARAMETERS)
    ]
    for parameter in parameters[:different]:
        parameter.data += group.rank
    sizes: list[int] = []

    def counted(tensor: torch.Tensor, **to: Any) -> Any:
        sizes.append(tensor.nbytes)
        return send(tensor, **to)

    send = dist.isend
    with patch.object(dist, "isend", counted):
        SameParameters(group, parameters, Precision())
    assert all(len(parameter.unique()) == 1 for parameter in parameters)
    return sizes, [float(parameter.detach()[-1]) for parameter in parameters]


@pytest.mark.parametrize("different", [0, 1, 2, PARAMETERS])
def test_parameters_are_sent_if_they_differ(three_ranks: Ranks, different: int) -> None:
    """In one message to each process that is next in the tree; else their checksums at most."""
    content = [NUMBERS * (4, 8)[k % 2] for k in range(different)]

    first, *others = three_ranks.run(begun, different)

    assert [values for _, values in (first, *others)] == [[float(k) for k in range(40)]] * 3
    large = [size for size in first[0] if size > 16 * PARAMETERS]
    assert large == [sum(content)] * (2 if different else 0)
    assert all(sum(sizes) <= 2 * 16 * PARAMETERS for sizes, _ in others)
    assert len(first[0]) == (6 if different else 2)
