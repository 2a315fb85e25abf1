"""Models that loop over blocks, in pipelines of several stages."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe.core.pipeline import GPipe
from lightning_gpipe.core.schedules import ActivationCheckpointing
from tests.support.loops import GPT, WIDTH, Block, states, tokens
from tests.support.models import assert_same_step
from tests.support.pipes import even, every_mode, with_and_without_threads

pytestmark = [every_mode, with_and_without_threads]


@pytest.fixture
def options(mode: ActivationCheckpointing, threads: bool) -> dict[str, Any]:
    return {"chunks": 3, "activation_checkpointing": mode, "threads": threads}


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_output_and_gradients(stages: int, options: dict[str, Any]):
    plain = GPT()
    pipeline = GPipe(
        copy.deepcopy(plain),
        even(4, stages),
        module="blocks",
        devices=["cpu"] * stages,
        **options,
    )
    for rows in (7, 5):
        assert_same_step(pipeline, plain, tokens(rows))
    pipeline.close()


class Within(nn.Module):
    """Runs all blocks in a state of the thread, with layers before and after them."""

    def __init__(self, state: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__()
        self.enter, self.head = (nn.Linear(WIDTH, WIDTH).double() for _ in range(2))
        self.blocks = nn.ModuleList(Block() for _ in range(4)).double()
        self.state = state

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        with self.state():
            hidden = x
            for block in self.blocks:
                hidden = block(hidden) * 2
        return self.head(hidden) + x


@pytest.mark.parametrize("state", [torch.no_grad, torch.autograd.graph.save_on_cpu])
def test_state_of_the_thread_around_the_loop(
    state: Callable[[], AbstractContextManager[Any]], options: dict[str, Any]
):
    """It had to be that at the beginning of the forward that holds the blocks."""
    plain = Within(state)
    pipeline = GPipe(
        copy.deepcopy(plain),
        [2, 2],
        module="blocks",
        devices=["cpu"] * 2,
        **options,
    )
    for training in (True, False, True):
        pipeline.train(training)
        plain.train(training)
        assert_same_step(pipeline, plain, states())
    with torch.no_grad():
        torch.testing.assert_close(pipeline(states()), plain(states()))
    pipeline.close()


class Recurrent(nn.Module):
    """Hands hidden states from layer to layer, with the rows in dim 1."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.GRU(WIDTH, WIDTH, batch_first=True) for _ in range(4))
        self.layers = nn.ModuleList(layers).double()

    def forward(self, x: Tensor) -> Tensor:
        h = None
        for layer in self.layers:
            x, h = layer(x, h)
        return x[:, -1]


def test_rows_in_another_dim_of_what_leaves_the_loop(options: dict[str, Any]):
    """The error printed all values, and called them no tensors."""
    pipeline = GPipe(
        Recurrent(),
        [2, 2],
        module="layers",
        devices=["cpu"] * 2,
        **options,
    )
    expected = r"a row per sample in dim 0, .* got shapes \(1, 2, 8\), .* from layers\.\d\[1\]"
    with pytest.raises(ValueError, match=expected):
        pipeline(states(6))
    pipeline.close()
