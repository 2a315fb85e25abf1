"""What an operator takes: all of them are counted, those of backward too."""

import torch
from torch import nn

from benchmarks.contestants.plain import mean_square
from benchmarks.contestants.task import Task
from benchmarks.processes import Operators, operator_time


def test_operators_are_counted() -> None:
    x = torch.ones(3, requires_grad=True)
    with Operators() as forward:
        y = x.sin().cos()
    with Operators() as backward:
        y.sum().backward()

    assert forward.number == 2
    assert backward.number >= 4  # of the sum, the cosine and the sine


def test_time_of_an_operator() -> None:
    task = Task(nn.Sequential(nn.Linear(4, 4)), torch.ones(8, 4), torch.ones(8, 4), mean_square)

    assert operator_time(task, chunks=4) > 0
