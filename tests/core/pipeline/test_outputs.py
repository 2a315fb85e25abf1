"""Outputs without a row per sample are returned once if they are equal, and refused otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe.core.data import whole
from lightning_gpipe.core.layout import cut
from lightning_gpipe.core.programs import Program, Step, Value
from tests.support.models import assert_same
from tests.support.programs import pipeline_of

WIDTH = 4


def rows(n: int = 7) -> Tensor:
    return torch.linspace(-1, 1, n * WIDTH, dtype=torch.float64).view(n, WIDTH).sin()


class Ending(nn.Module):
    """Blocks, and what one ends with."""

    def __init__(self, end: Any) -> None:
        super().__init__()
        self.block = nn.Linear(WIDTH, WIDTH).double()
        self.end = end

    def program(self) -> Program:
        steps = [
            Step(self.block, (Value(0),), 1, 0, name="block"),
            Step(self.end, (Value(1),), 2, 1, name="the end"),
        ]
        return Program(steps, inputs=[0], outputs=[2], n=2)


def ended(end: Any, chunks: int | None = None, n: int = 7) -> Any:
    ending = Ending(end)
    layers = nn.Sequential(ending.block, nn.Identity())
    pipeline = pipeline_of(cut(layers, [1, 1]), "never")
    return pipeline.run_program(ending.program(), [rows(n)], chunks=chunks)[0]


@pytest.mark.parametrize("n", [6, 7])
@pytest.mark.parametrize("end", [Tensor.mean, lambda x: x.mean(0, keepdim=True)])
def test_output_without_rows_is_refused_by_the_name_of_its_step(end: Any, n: int) -> None:
    with pytest.raises(ValueError, match=r"row per sample.*from the end.*or write chunks=1"):
        ended(end, n=n)
    ended(end, n=n, chunks=1)


def test_output_that_is_the_same_for_all_micro_batches_is_returned_once() -> None:
    table = torch.arange(5.0).view(1, 5)
    assert_same(ended(lambda x: (x, table, torch.tensor(3)))[1:], (table, torch.tensor(3)))


def test_marked_output_that_differs_is_refused_by_the_name_of_its_step() -> None:
    with pytest.raises(ValueError, match=r"\(1, 4\), .* from the end.*or write chunks=1"):
        ended(lambda x: whole(x[:1]))


def test_marked_output_with_a_gradient_is_returned_once() -> None:
    table = torch.eye(WIDTH, dtype=torch.float64).requires_grad_()
    assert_same(ended(lambda x: whole(table * 2)), table * 2)
    assert_same(ended(lambda x: whole(table.to_sparse())).to_dense(), table)


def test_output_with_several_rows_per_sample_is_concatenated() -> None:
    assert ended(lambda x: x.repeat_interleave(3, 0)).shape == (21, WIDTH)
