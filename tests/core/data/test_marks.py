from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_gpipe import whole
from lightning_gpipe.core.data.marks import copy_marks, is_whole
from tests.support.models import Call, assert_same, gradients, rows
from tests.support.pipes import Pipe, every_mode


class Mix(nn.Module):
    """Multiplies the rows by a table that belongs to none of them, and passes the table on."""

    def __init__(self, product: Callable[[Tensor, Tensor], Tensor] = torch.matmul) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.product = product

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        x = self.product(self.linear(inputs["x"]), inputs["table"])
        return {"x": x.tanh(), "table": inputs["table"]}


def mixers() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(*(Mix() for _ in range(4))).double()


def test_marked_tensor_is_the_same_tensor() -> None:
    table = torch.randn(4, 3, requires_grad=True)

    marked = whole(table)

    assert torch.equal(marked, table)
    assert is_whole(marked)
    assert not is_whole(table)
    marked.sum().backward()
    assert torch.equal(table.grad, torch.ones(4, 3))  # type: ignore[arg-type]  # just computed


@pytest.mark.parametrize("value", ["name", 3, {"x": 1}, [torch.ones(2)], [{"x": torch.ones(2)}]])
def test_what_cannot_be_marked(value: Any) -> None:
    with pytest.raises(TypeError, match=f"without tensors: got {type(value).__name__}"):
        whole(value)


@pytest.mark.parametrize("value", [["a", "b"], (3, 4), []])
def test_marked_list_is_equal_to_the_list(value: Any) -> None:
    assert is_whole(whole(value))
    assert whole(value) == value
    assert isinstance(whole(value), type(value))


@pytest.mark.parametrize("value", [[torch.ones(2)], [np.ones(2)]], ids=["tensor", "array"])
def test_mark_that_a_worker_of_a_loader_would_lose(value: Any) -> None:
    loader: DataLoader[Any] = DataLoader(value, batch_size=None, collate_fn=whole, num_workers=1)

    with pytest.raises(RuntimeError, match="Mark it in on_after_batch_transfer"):
        next(iter(loader))


def test_result_of_a_marked_array_has_no_mark() -> None:
    array = whole(np.arange(3))

    assert is_whole(array)
    assert not is_whole(array * 2)
    assert not is_whole(array[1:])


def test_mark_is_carried_to_what_stands_for_the_tensor() -> None:
    table = torch.ones(2)

    assert is_whole(copy_marks(whole(table), table.clone()))
    assert not is_whole(copy_marks(table, table.clone()))


@every_mode
@pytest.mark.parametrize("requires_grad", [True, False])
def test_table_reaches_every_micro_batch_and_comes_out_once(
    requires_grad: bool, pipe: Pipe
) -> None:
    ends = []
    for make in (lambda module: module, lambda module: pipe(module)):
        module = make(mixers())
        x, table = rows(7), torch.eye(3).double().mul(2).requires_grad_(requires_grad)
        outputs = module({"x": x, "table": whole(table)})
        (outputs["x"].exp().sum() + outputs["table"].square().sum()).backward(
            inputs=_needed(module, x, table)
        )
        ends.append((outputs, gradients(module), x.grad, table.grad))

    assert_same(ends[1], ends[0])


def _needed(module: nn.Module, *tensors: Tensor) -> list[Tensor]:
    return [*module.parameters(), *(each for each in tensors if each.requires_grad)]


def test_table_that_a_layer_computes(pipe: Pipe) -> None:
    def layer(x: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"x": x["x"] @ x["table"], "table": whole(x["table"] * 2)}

    module = nn.Sequential(nn.Identity(), Call(layer))
    x, table = rows(7), torch.eye(3).double()

    assert_same(pipe(module)({"x": x, "table": whole(table)}), {"x": x, "table": table * 2})


def test_tables_that_differ_are_refused(pipe: Pipe) -> None:
    module = nn.Sequential(nn.Identity(), Call(lambda x: whole(x.mean())))

    with pytest.raises(ValueError, match="must be the same for all micro-batches"):
        pipe(module)(rows(7))


@every_mode
def test_scalar_that_passes_through_comes_out_as_it_was(pipe: Pipe) -> None:
    scale = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    module = nn.Sequential(nn.Identity(), Call(lambda x: (x[0] * x[1], x[1])))

    scaled, same = pipe(module)((rows(7), scale))

    assert same.shape == ()
    (scaled.sum() + same).backward()
    assert_same(scale.grad, rows(7).sum() + 1)


@every_mode
def test_sparse_table(pipe: Pipe) -> None:
    def product(x: Tensor, table: Tensor) -> Tensor:
        return torch.sparse.mm(table, x.t()).t()

    ends: list[Any] = []
    for piping in (False, True):
        module: nn.Module = nn.Sequential(*(Mix(product) for _ in range(4))).double()
        module.load_state_dict(mixers().state_dict())
        if piping:
            assert isinstance(module, nn.Sequential)
            module = pipe(module)
        table = (torch.eye(3) * 2).double().to_sparse()
        y = module({"x": rows(7), "table": whole(table)})["x"]
        y.square().sum().backward()
        ends.append((y, gradients(module)))

    assert_same(ends[1], ends[0])
