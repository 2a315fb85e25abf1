"""What the engine itself costs, in calls of its functions: the same on every machine.

A call takes part of a microsecond, and a nearly empty layer takes some ten. A feature that is not
in use must cost nothing. Time does not show it where one of many does; these numbers do.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lightning_gpipe
from lightning_gpipe.core.plan import ActivationCheckpointing
from tests.support.pipes import Pipe

STAGES = 4
# Calls for each pair of stage and micro-batch, and beside those for each mini-batch, with a margin.
# Counted with Python 3.11; in later versions comprehensions are no calls.
AT_MOST: dict[ActivationCheckpointing, tuple[int, int]] = {
    "never": (46, 880),
    "always": (128, 1000),
}


class Scale(nn.Module):
    """A layer that is hardly there."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def calls_in_a_step(pipe: Pipe, chunks: int, mode: ActivationCheckpointing) -> int:
    """The calls of functions of this package in a step, forward and backward, on one device."""
    pipeline = pipe(
        nn.Sequential(*(Scale() for _ in range(STAGES))),
        [1] * STAGES,
        devices=1,
        chunks=chunks,
        mode=mode,
    )
    x, package = torch.ones(chunks, 2), str(lightning_gpipe.__path__[0])
    count = 0

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(package)

    for _ in range(3):  # the first ones look for what later ones know
        pipeline(x).sum().backward()
    sys.setprofile(profile)
    try:
        pipeline(x).sum().backward()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("mode", AT_MOST)
def test_calls_of_a_step(pipe: Pipe, mode: ActivationCheckpointing) -> None:
    few, many = (calls_in_a_step(pipe, chunks, mode) for chunks in (4, 12))
    per_pair = (many - few) / (8 * STAGES)
    per_minibatch = few - 4 * STAGES * per_pair

    pairs, minibatch = AT_MOST[mode]
    assert per_pair <= pairs
    assert per_minibatch <= minibatch
