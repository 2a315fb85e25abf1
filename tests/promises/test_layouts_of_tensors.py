"""Transparency: layers may pass sparse and jagged tensors, with gradients.

What cannot be split or concatenated is refused in words: which layout, and what to do.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.models import assert_same_steps, rows
from tests.support.pipes import Pipe, every_mode, with_and_without_threads
from tests.support.skip_layers import pair

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype"),
]

W = 3
X = rows(12)[:9]


class Apply(nn.Module):
    """Applies a function."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)


def jagged(x: Tensor) -> Tensor:
    """Two sequences, of one row and of the others."""
    return torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 1, len(x)]))


def values(x: Any) -> Tensor:
    found: Tensor = x.values()
    return found


LAYOUTS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "COO": (Tensor.to_sparse, Tensor.to_dense),
    "hybrid COO": (lambda x: x.to_sparse(1), Tensor.to_dense),
    "CSR": (Tensor.to_sparse_csr, Tensor.to_dense),
    "jagged": (jagged, values),
}
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


def layers(*between: nn.Module) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(W, W), *between, nn.Linear(W, W)).double()


@every_layout
@every_mode
@with_and_without_threads
def test_between_stages(layout: str, pipe: Pipe) -> None:
    """Jagged gradients did not fit the outputs of a recomputation."""
    make, undo = LAYOUTS[layout]
    plain = layers(Apply(make), Apply(undo))

    assert_same_steps(pipe(plain, stages=4), plain, [X, X])


@every_layout
@every_mode
def test_through_a_stage(layout: str, pipe: Pipe) -> None:
    """A sparse tensor that a stage returned as it came had no view to start backward at."""
    make, undo = LAYOUTS[layout]
    plain = layers(Apply(make), nn.Identity(), Apply(undo))

    assert_same_steps(pipe(plain, stages=5), plain, [X])


@every_layout
@every_mode
def test_without_gradients(layout: str, pipe: Pipe) -> None:
    make, undo = LAYOUTS[layout]
    plain = layers(Apply(lambda x: (x, make(x.detach()))), Apply(lambda xs: xs[0] * undo(xs[1])))

    assert_same_steps(pipe(plain, stages=4), plain, [X])


@every_layout
@every_mode
def test_skip_connections(layout: str, pipe: Pipe) -> None:
    make, undo = LAYOUTS[layout]
    stashes, pops = pair(make, lambda x, skip: x + undo(skip))
    plain = layers(stashes, nn.Linear(W, W), pops)

    assert_same_steps(pipe(plain, stages=5), plain, [X])


def test_coo_outputs_without_gradients(pipe: Pipe) -> None:
    plain = nn.Sequential(nn.Linear(W, W), Apply(lambda x: x.detach().to_sparse())).double()

    output = pipe(plain)(X)

    assert output.layout is torch.sparse_coo
    torch.testing.assert_close(output.to_dense(), plain(X).to_dense())


@every_layout
def test_output_of_one_micro_batch(layout: str, pipe: Pipe) -> None:
    make, undo = LAYOUTS[layout]
    plain = nn.Sequential(nn.Linear(W, W), Apply(make)).double()

    found, expected = undo(pipe(plain, chunks=1)(X)), undo(plain(X))

    torch.testing.assert_close(found, expected)


def nested(x: Tensor) -> Tensor:
    return torch.nested.as_nested_tensor([x[:1], x[1:]])


@pytest.mark.parametrize(
    "make, message",
    [
        (Tensor.to_sparse, r"layout torch.sparse_coo that requires a gradient.*x.to_dense\(\)"),
        (Tensor.to_sparse_csr, r"layout torch.sparse_csr that requires.*x.to_dense\(\)"),
        (lambda x: x.detach().to_sparse_csr(), r"layout torch.sparse_csr for leaf 0"),
        (jagged, "layout torch.jagged .*Return it padded, with torch.nested.to_padded_tensor"),
        (lambda x: jagged(x.detach()), "layout torch.jagged for leaf 0. Return it padded"),
        (nested, "got a nested tensor. Return it padded"),
        (lambda x: nested(x.detach()), "Return it padded"),
    ],
    ids=["COO", "CSR", "CSR, no grad", "jagged", "jagged, no grad", "nested", "nested, no grad"],
)
def test_outputs_that_cannot_be_concatenated(
    make: Callable[[Tensor], Tensor], message: str, pipe: Pipe
) -> None:
    plain = nn.Sequential(nn.Linear(W, W), Apply(make)).double()

    with pytest.raises(ValueError, match=message):
        pipe(plain)(X)


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
@pytest.mark.parametrize("chunks", [1, 3])
def test_nested_batch(layout: torch.layout, chunks: int, pipe: Pipe) -> None:
    batch = torch.nested.nested_tensor([torch.ones(2, W), torch.ones(1, W)], layout=layout)

    with pytest.raises(ValueError, match="got a nested tensor of layout .* Pad it, with torch"):
        pipe(layers(), chunks=chunks)(batch)


def test_indices_with_offsets(pipe: Pipe) -> None:
    batch = torch.arange(9), torch.tensor([0, 2, 4])

    with pytest.raises(ValueError, match=r"indices of nn.EmbeddingBag, to the shape \(rows, long"):
        pipe(layers())(batch)
