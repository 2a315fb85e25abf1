from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe.core.pipeline import GPipe
from lightning_gpipe.core.profile.walk import Numbered, Visit, walk_program
from lightning_gpipe.core.programs import Program, Step, Value, chain

X = torch.linspace(-1, 1, 6).reshape(3, 2)


@pytest.fixture
def pipeline() -> GPipe:
    torch.manual_seed(0)
    return GPipe(
        nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)), [2, 1], devices=["cpu"]
    )


def walk(pipeline: GPipe, x: Any, visit: Visit | None = None) -> Any:
    """Walk over the layers, each a part by itself."""
    first, last = pipeline.stages
    program = chain([(layer, "a layer")] for layer in pipeline)
    options = {} if visit is None else {"visit": visit}
    [output] = walk_program([first, first, last], program, [x], **options)
    return output


def test_walk_computes_what_the_layers_do(pipeline: GPipe) -> None:
    expected = nn.Sequential(*pipeline)(X)

    torch.testing.assert_close(walk(pipeline, X), expected)


def test_parts_are_visited_in_order_with_their_indices(pipeline: GPipe) -> None:
    seen: list[tuple[int, Any]] = []

    def visit(k: int, run: Any, needed: Numbered) -> Numbered:
        made = run(needed)
        seen.append((k, dict(needed)[k]))
        seen.append((k, dict(made)[k + 1]))
        return made

    y = walk(pipeline, X, visit)

    layers = list(pipeline)
    expected = [X, layers[0](X), layers[1](layers[0](X)), y]
    assert [k for k, _ in seen] == [0, 0, 1, 1, 2, 2]
    torch.testing.assert_close([x for _, x in seen[::2]], expected[:-1])
    torch.testing.assert_close([x for _, x in seen[1::2]], expected[1:])


def test_visitor_decides_what_the_next_part_takes(pipeline: GPipe) -> None:
    def visit(k: int, run: Any, needed: Numbered) -> Numbered:
        return {k + 1: needed[k] + 10**k}

    assert walk(pipeline, 0, visit) == 111


def test_value_that_skips_a_part(pipeline: GPipe) -> None:
    steps = [
        Step(torch.neg, (Value(0),), 1, 0),
        Step(torch.exp, (Value(1),), 2, 0),
        Step(torch.add, (Value(2), Value(0)), 3, 1),
    ]
    program = Program(steps, inputs=[0], outputs=[3, 1], n=2)

    outputs: list[Tensor] = walk_program(pipeline.stages, program, [X])

    torch.testing.assert_close(outputs, [X + (-X).exp(), -X])
