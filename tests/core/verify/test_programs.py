"""Promise: a verification finds out where micro-batches of a program differ from the mini-batch.

Here are also the tests of ``subject``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe import whole
from lightning_gpipe.core.layout import Partition
from lightning_gpipe.core.programs import Program, Step, Value
from lightning_gpipe.core.verify.parity import Parity
from lightning_gpipe.core.verify.subject import VerifiedProgram
from lightning_gpipe.core.verify.verification import verify_program
from tests.support.programs import pipeline_of

WIDTH = 4


def verified(between: Callable[[Tensor], Tensor] = torch.tanh, *layers: nn.Module) -> Parity:
    """Verify two linear layers with something between, and a bias for all rows."""
    torch.manual_seed(0)
    first, last = (nn.Linear(WIDTH, WIDTH).double() for _ in range(2))
    partitions = [
        Partition(0, 0, (first, *layers), ("first", *map(str, range(len(layers))))),
        Partition(1, 1 + len(layers), (last,), ("last",)),
    ]
    steps = [
        Step(first, (Value(0),), 2, 0, name="first"),
        Step(between, (Value(2),), 3, 0, name="between"),
        Step(last, (Value(3),), 4, 1, name="last"),
        Step(torch.add, (Value(4), Value(1)), 5, 1, name="add"),
    ]
    pipeline = pipeline_of(partitions)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(7, WIDTH, dtype=torch.float64, generator=generator).requires_grad_()
    bias = whole(torch.linspace(-1, 1, WIDTH, dtype=torch.float64).requires_grad_())
    program = Program(steps, inputs=[0, 1], outputs=[5, 3], n=2)
    parity = verify_program(VerifiedProgram(pipeline, program), [x, bias])
    assert all(p.grad is None for p in (*first.parameters(), *last.parameters()))
    return parity


def test_program_that_agrees() -> None:
    parity = verified()

    parity.check()
    assert parity.difference is None
    assert {kind: len(found) for kind, found in parity.compared.items()} == {
        "output": 2,
        "gradients": 4,
        "buffers": 0,
        "input gradients": 2,
        "loss terms": 0,
    }


def test_step_that_depends_on_the_micro_batch() -> None:
    parity = verified(lambda x: x - x.mean(0))

    with pytest.raises(RuntimeError, match=r"the output\[0\]"):
        parity.check()


def test_batch_norm_is_a_known_reason() -> None:
    norm: Any = nn.BatchNorm1d(WIDTH).double()
    parity = verified(norm, norm)

    parity.check()
    assert parity.difference is not None
    assert "stage 0 has a BatchNorm1d, which normalises by micro-batch" in str(parity)


def test_stage_that_does_not_repeat_is_named() -> None:
    calls = itertools.count(1)

    parity = verified(lambda x: x * next(calls))

    with pytest.raises(
        RuntimeError, match=r"between two plain runs, the output\[1\] of stage 0 \("
    ):
        parity.check()
