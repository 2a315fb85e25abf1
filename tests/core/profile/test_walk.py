from typing import Any

import pytest
import torch
from torch import nn

from lightning_gpipe.core.pipeline import GPipe
from lightning_gpipe.core.profile.walk import walk

X = torch.linspace(-1, 1, 6).reshape(3, 2)


@pytest.fixture
def pipeline() -> GPipe:
    torch.manual_seed(0)
    return GPipe(
        nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)), [2, 1], devices=["cpu"]
    )


def run(k: int, layer: nn.Module, x: Any) -> Any:
    return layer(x)


def test_walk_computes_what_the_layers_do(pipeline: GPipe) -> None:
    expected = nn.Sequential(*pipeline)(X)

    torch.testing.assert_close(walk(pipeline.stages, X, run), expected)


def test_layers_are_visited_in_order_with_their_indices(pipeline: GPipe) -> None:
    seen: list[tuple[int, nn.Module]] = []

    def visit(k: int, layer: nn.Module, x: Any) -> Any:
        seen.append((k, layer))
        return layer(x)

    walk(pipeline.stages, X, visit)

    assert seen == list(enumerate(pipeline))


def test_visitor_decides_what_the_next_layer_takes(pipeline: GPipe) -> None:
    assert walk(pipeline.stages, 0, lambda k, layer, x: x + 10**k) == 111
