"""Gradients and scales are the same in all processes, of which each has some parameters."""

from __future__ import annotations

import math
from datetime import timedelta

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision, Precision
from torch import nn

from lightning_gpipe.distributed.gradients import SameParameters
from lightning_gpipe.distributed.group import Group
from tests.support.ranks import Pool

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
