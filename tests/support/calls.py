"""Counts the calls of functions of the package in a step.

In a process of its own, since one in which other tests have run has more to look after.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

import lightning_gpipe
from lightning_gpipe import GPipe

STAGES = 4
Way = Literal["never", "always", "1f1b"]  # of recomputation, or a loss for each micro-batch


class Scale(nn.Module):
    """A layer that is hardly there."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def calls_in_a_step(chunks: int, way: Way) -> int:
    """The calls in a step, forward and backward, on one device."""
    pipeline = GPipe(
        nn.Sequential(*(Scale() for _ in range(STAGES))),
        [1] * STAGES,
        devices=["cpu"],
        chunks=chunks,
        activation_checkpointing="never" if way == "1f1b" else way,
    )
    x, package = torch.ones(chunks, 2), str(lightning_gpipe.__path__[0])
    count = 0

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(package)

    def step() -> None:
        if way != "1f1b":
            pipeline(x).sum().backward()
            return
        loss = pipeline.by_micro_batch(lambda rows: pipeline(rows).sum(), x).loss
        assert loss is not None
        loss.backward()

    for _ in range(3):  # the first ones look for what later ones know
        step()
    sys.setprofile(profile)
    try:
        step()
    finally:
        sys.setprofile(None)
    return count


def counts() -> dict[Way, tuple[float, float]]:
    """By way, the calls per pair of stage and micro-batch, and beside these per mini-batch."""
    found: dict[Way, tuple[float, float]] = {}
    for way in get_args(Way):
        few, many = (calls_in_a_step(chunks, way) for chunks in (4, 12))
        per_pair = (many - few) / (8 * STAGES)
        found[way] = per_pair, few - 4 * STAGES * per_pair
    return found
