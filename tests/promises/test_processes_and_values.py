"""Same numbers: any value that passes between stages passes between processes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe import GPipe, PaddedSequences, collect_loss_terms, loss_term, whole
from lightning_gpipe.core.data import tree_flatten
from tests.support.models import Call, rows
from tests.support.processes import Owners, assert_equal, processes
from tests.support.ranks import Pool
from tests.support.skip_layers import pair

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")

W = 3


def linear() -> nn.Module:
    return nn.Linear(W, W).double()


@dataclass
class Info:
    """Something that PyTorch knows nothing of."""

    name: str
    scale: Tensor


class Sparse(nn.Module):
    """Hands on a sparse tensor, and a tensor that is there twice."""

    def forward(self, x: Tensor) -> Any:
        return {"x": [x, x], "sparse": whole(torch.eye(W, dtype=x.dtype).to_sparse()), "rows": None}


class Multiply(nn.Module):
    def forward(self, given: Any) -> Tensor:
        one, other = given["x"]
        assert one is other
        return one @ given["sparse"].to_dense() + other


class Growing(nn.Module):
    """Hands on values of another type and structure in every call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return (x, [x.new_ones(self.calls), 1.5 * self.calls, None][: self.calls % 4], self.calls)


class Shrinking(nn.Module):
    def forward(self, given: Any) -> Tensor:
        x, others, calls = given
        assert len(others) == calls % 4
        return x * calls


class Penalty(nn.Module):
    """Hands out loss terms."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        loss_term("activity", y.square().sum())
        loss_term("mean", y.square().mean(), reduction="mean")
        return y


class Masked(nn.Module):
    """Hands on what it gets, with another state."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, given: Any) -> Any:
        x = self.linear(given["x"]) * given["mask"][..., None]
        return {**given, "x": x + given["table"][: x.size(1)], "n": given["info"].scale * 2}


def skips() -> nn.Sequential:
    """Skips within a process, to the next one, and over one; two of a name."""
    (a, f), (b, d), (c, e) = pair(torch.tanh, torch.mul), pair(), pair(lambda x: x * 2)
    return nn.Sequential(
        nn.Sequential(linear(), a), nn.Sequential(b, linear(), c), d, nn.Sequential(linear(), e), f
    )


def padded() -> tuple[Any, Any]:
    x = torch.randn(7, 5, W, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    lengths = torch.tensor([5, 2, 3, 1, 4, 4, 2])
    mask = torch.arange(5) < lengths[:, None]
    table = whole(torch.ones(9, W, dtype=torch.float64))
    info = Info("a", whole(torch.tensor(2.0)))
    x.requires_grad_()
    return {"x": x, "mask": mask, "lengths": lengths, "table": table, "info": info}, x


def plain() -> tuple[Any, Any]:
    x = rows(7).requires_grad_()
    return x, x


class Model(NamedTuple):
    """A model, its balance, its input and what of it has a gradient, and further options."""

    make: Callable[[], nn.Sequential]
    balance: list[int]
    given: Callable[[], tuple[Any, Any]] = plain
    options: tuple[tuple[str, Any], ...] = ()


PADDED = (
    ("microbatching", PaddedSequences("lengths", trim=["x", "mask"], pad_outputs=["x", "mask"])),
)

MODELS = {
    "skips": Model(skips, [1, 2, 2]),
    "sparse": Model(lambda: nn.Sequential(linear(), Sparse(), Multiply(), linear()), [2, 1, 1]),
    "growing": Model(lambda: nn.Sequential(linear(), Growing(), Shrinking(), linear()), [2, 1, 1]),
    "loss terms": Model(lambda: nn.Sequential(Penalty(), Penalty(), Penalty()), [1, 1, 1]),
    "padded": Model(lambda: nn.Sequential(Masked(), Masked(), Masked()), [1, 1, 1], padded, PADDED),
    "edited": Model(
        lambda: nn.Sequential(linear(), Call(lambda x: x.mul_(2)), nn.ReLU(inplace=True), linear()),
        [1, 2, 1],
    ),
}


def steps(name: str, owners: Owners | None) -> Any:
    """What came of three steps: outputs, loss terms, gradients of the input."""
    torch.manual_seed(4)
    make, balance, given, options = MODELS[name]
    pipeline = GPipe(
        make(), balance, devices=["cpu"] * 3, chunks=3, **dict(options), **processes(owners)
    )
    found = []
    for _ in range(3):
        batch, x = given()
        with collect_loss_terms() as terms:
            y = pipeline(batch)
        outputs = [z for z in tree_flatten(y).leaves if isinstance(z, Tensor) and z.requires_grad]
        loss = torch.stack([z.square().mean() for z in [*outputs, *terms.values()]]).sum()
        loss.backward()
        found.append(([z.detach() for z in outputs], str(list(terms)), loss.detach(), x.grad))
    pipeline.close()
    return found


@pytest.mark.parametrize("owners", [(0, 1, 2), (0, 1, 0)], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_values(four_ranks: Pool, name: str, owners: Owners) -> None:
    expected = steps(name, None)

    for found in four_ranks.run(steps, name, owners, among=len(set(owners))):
        assert_equal(found, expected)
