"""What the tests of hooks share: a module of six layers, hooks, and the ways to run."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.models import assert_same_step, perceptron, rows
from tests.support.pipes import MODES

LAYERS = 6  # in two stages of three: 0 is the first of a stage, 4 in the middle of one, 5 the last

# In every mode; one without threads will do.
every_mode_and_one_without_threads = pytest.mark.parametrize(
    "mode, threads", [*((mode, True) for mode in MODES), ("always", False)]
)


def six_layers() -> nn.Sequential:
    """Always the same."""
    torch.manual_seed(3)
    return perceptron(LAYERS)


def assert_same_twice(pipeline: nn.Module, plain: nn.Module) -> None:
    """Two steps give the same; two, because a stage copies its input the first time it runs."""
    for seed in range(2):
        assert_same_step(pipeline, plain, rows(7, seed=seed))


def doubled(gradients: Any) -> Any:
    """What a hook that doubles gradients returns."""
    return tuple(None if gradient is None else gradient * 2 for gradient in gradients)
