from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_gpipe.core.data.marks import whole
from lightning_gpipe.core.data.microbatch.rows import Rows

split = Rows().split


def merge(outputs: list[Any]) -> Any:
    return Rows().merge(outputs, None)


def rows(count: int, width: int = 2) -> Tensor:
    return torch.arange(float(count * width)).reshape(count, width)


@pytest.mark.parametrize(
    "count, chunks, sizes",
    [
        (10, 4, [3, 3, 2, 2]),
        (8, 4, [2, 2, 2, 2]),
        (9, 4, [3, 2, 2, 2]),
        (5, 1, [5]),
        (3, 3, [1, 1, 1]),
        (7, 5, [2, 2, 1, 1, 1]),
    ],
)
def test_sizes_differ_by_at_most_one(count: int, chunks: int, sizes: list[int]) -> None:
    assert [len(microbatch) for microbatch in split(rows(count), chunks)] == sizes


def test_batch_smaller_than_chunks() -> None:
    assert [len(microbatch) for microbatch in split(rows(3), 8)] == [1, 1, 1]


@pytest.mark.parametrize(
    "count, sizes", [(9, [3, 2, 2, 2]), (3, [3]), (2, [2]), (1, [1]), (16, [2] * 8)]
)
def test_micro_batches_of_two_rows_at_least(count: int, sizes: list[int]) -> None:
    assert [len(microbatch) for microbatch in Rows(at_least=2).split(rows(count), 8)] == sizes


def test_batch_without_rows() -> None:
    (microbatch,) = split(rows(0), 4)

    assert microbatch.shape == (0, 2)


def test_rows_stay_in_order() -> None:
    first, second = split(rows(3), 2)

    assert first.tolist() == [[0, 1], [2, 3]]
    assert second.tolist() == [[4, 5]]


def test_nested_batch() -> None:
    batch = {"x": (rows(4), [rows(4, 3)]), "y": torch.arange(4)}

    first, second = split(batch, 2)

    assert first["x"][0].tolist() == [[0, 1], [2, 3]]
    assert second["x"][1][0].tolist() == [[6, 7, 8], [9, 10, 11]]
    assert second["y"].tolist() == [2, 3]


def test_what_has_no_rows_goes_to_every_micro_batch() -> None:
    scale, name = torch.tensor(2.0), "name"

    first, second = split((rows(2), scale, name, None, 7), 2)

    assert torch.equal(first[1], scale)
    assert torch.equal(second[1], scale)
    assert first[2:] == second[2:] == (name, None, 7)


@pytest.mark.parametrize("chunks", [1, 2])
def test_tensors_that_disagree_on_their_rows(chunks: int) -> None:
    batch = {"x": rows(4), "mask": [torch.ones(3, 5)]}

    with pytest.raises(ValueError, match="same size in dim 0") as error:
        split(batch, chunks)

    assert "input['x'] of shape (4, 2)" in str(error.value)
    assert "input['mask'][0] of shape (3, 5)" in str(error.value)


@pytest.mark.parametrize(
    "batch, found",
    [
        (["text", 3], "no tensor in list"),
        ((), "no tensor in tuple"),
        (None, "no tensor in NoneType"),
        (torch.tensor(1.0), "input of shape ()"),
        ({"scale": torch.tensor(1.0)}, "input['scale'] of shape ()"),
    ],
)
def test_batch_with_nothing_to_split(batch: Any, found: str) -> None:
    with pytest.raises(ValueError, match="must hold a tensor with a batch dimension") as error:
        split(batch, 2)

    assert f"got {found}" in str(error.value)


def test_marked_tensor_goes_to_every_micro_batch() -> None:
    first, second = split({"x": rows(4), "table": whole(rows(3))}, 2)

    assert torch.equal(first["table"], rows(3))
    assert torch.equal(second["table"], rows(3))


@pytest.mark.parametrize("chunks", [1, 2])
def test_sparse_rows_are_refused(chunks: int) -> None:
    with pytest.raises(ValueError, match="must be dense, so that they can be split"):
        split((rows(2), rows(2).to_sparse()), chunks)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
def test_nested_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="must be dense"):
        split(torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), 2)


def test_complex_rows() -> None:
    x = torch.view_as_complex(rows(4))

    assert torch.equal(merge(split(x, 3)), x)


def test_outputs_are_concatenated_in_order() -> None:
    assert merge([torch.tensor([[1], [2]]), torch.tensor([[3]])]).tolist() == [[1], [2], [3]]


def test_outputs_without_dimension_are_stacked() -> None:
    assert merge([torch.tensor(1.0), torch.tensor(3.0)]).tolist() == [1.0, 3.0]


@pytest.mark.parametrize("value", [None, "mean", 3, 2.5, True])
def test_equal_values_are_given_once(value: Any) -> None:
    assert merge([{"value": value}, {"value": value}]) == {"value": value}


@pytest.mark.parametrize(
    "values", [["mean", "sum"], [3, 4], [None, 0], [rows(1), None], [None, rows(1)]]
)
def test_values_that_differ(values: list[Any]) -> None:
    with pytest.raises(ValueError, match="must be the same for all micro-batches") as error:
        merge([{"a": "same", "b": value} for value in values])

    assert "for leaf 1" in str(error.value)
    assert str(values) in str(error.value)


def test_structures_that_differ() -> None:
    with pytest.raises(ValueError, match="one structure") as error:
        merge([(rows(1), rows(1)), [rows(1), rows(1)]])

    assert "for micro-batch 0" in str(error.value)
    assert "for micro-batch 1" in str(error.value)


def test_the_only_output_is_the_output() -> None:
    output = (torch.tensor(1.0), object())

    assert merge([output]) is output


@pytest.mark.parametrize("chunks", range(1, 8))
def test_split_and_merge_change_nothing(chunks: int) -> None:
    x, scale = rows(6).requires_grad_(), torch.tensor([[2.0]]).expand(6, 1)

    merged = merge(split({"x": x, "scale": (scale,), "name": "batch"}, chunks))

    assert merged.keys() == {"x", "scale", "name"}
    assert torch.equal(merged["x"], x)
    assert torch.equal(merged["scale"][0], scale)
    weights = torch.randn(6, 2)
    (gradient,) = torch.autograd.grad((merged["x"] * weights).sum(), x)
    assert torch.equal(gradient, weights)
