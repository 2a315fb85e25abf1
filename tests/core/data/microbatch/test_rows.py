"""Batches are split into micro-batches by rows, and outputs merged again.

Here are also the tests of ``merging``.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from lightning_gpipe.core.data.marks import whole
from lightning_gpipe.core.data.microbatch.rows import Rows
from tests.support.models import assert_same, assert_same_step, assert_same_steps
from tests.support.pipes import Pipe, every_mode, with_and_without_threads

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


def test_stacked_outputs_with_gradients_are_warned_of() -> None:
    """A sum over them had the loss term of a layer once for each micro-batch."""
    losses = [torch.tensor(k, requires_grad=True) for k in (1.0, 2.0)]
    with pytest.warns(UserWarning, match=r"let its layer hand it out by loss_term\(\)"):
        merged = Rows().merge(losses, torch.zeros(4, 2))

    assert merged.shape == (2,)


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
    assert str(values).replace(str(rows(1)), "a tensor of shape (1, 2)") in str(error.value)


def test_structures_that_differ() -> None:
    with pytest.raises(ValueError, match="one structure") as error:
        merge([(rows(1), rows(1)), [rows(1), rows(1)]])

    assert "for micro-batch 0" in str(error.value)
    assert "for micro-batch 1" in str(error.value)


class Unpacked(nn.Module):
    """A recurrent layer whose output is as long as the longest of its rows."""

    def __init__(self, alone: bool) -> None:
        super().__init__()
        self.alone = alone
        self.recurrent = nn.GRU(2, 2, batch_first=True)

    def forward(self, batch: Any) -> Any:
        x, lengths = batch
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        padded = pad_packed_sequence(self.recurrent(packed)[0], batch_first=True)
        return padded[0] if self.alone else padded


@pytest.mark.parametrize("alone", [True, False])
def test_outputs_of_other_lengths(alone: bool, pipe: Pipe) -> None:
    """The error was that of ``torch.cat``, which names no output and no cure."""
    piped = pipe(nn.Sequential(Unpacked(alone), nn.Identity()), [1, 1], chunks=2)

    message = r"\[\(2, 5, 2\), \(2, 3, 2\)\] for leaf 0 .* total_length=.*PaddedSequences"
    with pytest.raises(ValueError, match=message) as error:
        piped((torch.randn(4, 5, 2), torch.tensor([5, 2, 3, 1])))

    assert isinstance(error.value.__cause__, RuntimeError)


def test_outputs_that_cannot_be_concatenated_for_another_reason() -> None:
    outputs = [rows(1), rows(1).to("meta")]

    with pytest.raises(RuntimeError) as error:
        merge(outputs)

    assert "one shape" not in str(error.value)


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


# Rows in another dim than dim 0.

T, B, W = 5, 7, 4  # time, rows, width


def sequence(time: int = T, rows: int = B) -> Tensor:
    generator = torch.Generator().manual_seed(time * 100 + rows)
    x = torch.randn(time, rows, W, dtype=torch.float64, generator=generator)
    return x.requires_grad_()


class Attend(nn.Module):
    """An encoder layer with the mask of padding that PyTorch wants as (rows, time)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(W, 2, 8, dropout=0.0)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**batch, "x": self.encoder(batch["x"], src_key_padding_mask=batch["mask"])}


class Last(nn.Module):
    """The output of the last time step."""

    def forward(self, x: Tensor) -> Tensor:
        return x[-1]


def encoders(*more: nn.Module) -> nn.Sequential:
    torch.manual_seed(3)
    layers = [nn.TransformerEncoderLayer(W, 2, 8, dropout=0.0) for _ in range(2)]
    return nn.Sequential(nn.Linear(W, W), *layers, *more).double()


@pytest.mark.parametrize("chunks, sizes", [(3, [3, 2, 2]), (2, [4, 3]), (9, [1] * 7)])
def test_split_along_another_dim(chunks: int, sizes: list[int]) -> None:
    x = sequence()

    pieces = Rows(dim=1).split(x, chunks)

    assert [tuple(piece.shape) for piece in pieces] == [(T, size, W) for size in sizes]
    assert torch.equal(Rows(dim=1).merge(pieces, x), x)


def test_micro_batches_are_contiguous_as_the_batch_is() -> None:
    assert all(piece.is_contiguous() for piece in Rows(dim=1).split(sequence(), 3))


def test_micro_batches_of_two_rows_at_least_along_another_dim() -> None:
    assert [x.shape[1] for x in Rows(2, dim=1).split(sequence(), 5)] == [3, 2, 2]


@every_mode
@with_and_without_threads
def test_time_first_encoder(pipe: Pipe) -> None:
    """PyTorch's own guide is written so. Split along dim 0, the time, it was 1.18 off."""
    plain = encoders()
    batches = [sequence(), sequence(7, 4), sequence(6, 6), sequence(3, 1)]

    assert_same_steps(pipe(plain, microbatching=Rows(dim=1)), plain, batches)


@every_mode
def test_labels_that_have_no_such_dim(pipe: Pipe) -> None:
    class Weigh(nn.Module):
        def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
            return {**batch, "x": batch["x"] * batch["weights"][:, None]}

    plain = nn.Sequential(Weigh(), nn.Identity(), Weigh())
    batch = {"x": sequence(), "weights": torch.arange(7.0).double()}

    assert_same_step(pipe(plain, microbatching=Rows(dim=1)), plain, batch)


@pytest.mark.parametrize("time", [T, B])  # also as long as there are rows
@every_mode
def test_dim_of_one_entry(time: int, pipe: Pipe) -> None:
    torch.manual_seed(3)
    plain = nn.Sequential(Attend(), Attend()).double()
    mask = torch.arange(time) >= torch.tensor([3, 5, 1, 2, 4, 4, 5])[:, None]

    pipeline = pipe(plain, microbatching=Rows(dim={"x": 1}))

    assert_same_step(pipeline, plain, {"x": sequence(time), "mask": mask})


@pytest.mark.parametrize("rows", [7, 6, 4])  # (rows, classes) is (4, 4) for the last
@every_mode
def test_outputs_with_rows_in_another_dim(rows: int, pipe: Pipe) -> None:
    plain = encoders(Last())

    pipeline = pipe(plain, microbatching=Rows(dim=1, output_dim=0))

    assert_same_step(pipeline, plain, sequence(rows=rows))


@pytest.mark.parametrize("rows", [7, 12])  # the second makes micro-batches of shape (4, 4)
def test_outputs_without_rows_in_the_dim_of_the_input_are_refused(rows: int, pipe: Pipe) -> None:
    pipeline = pipe(encoders(Last()), microbatching=Rows(dim=1))

    with pytest.raises(ValueError, match=r"in dim 1, as the input: .* Rows\(dim=1, output_dim=0\)"):
        pipeline(sequence(rows=rows))


def test_dim_of_outputs_by_entry() -> None:
    batch = {"x": sequence(), "y": torch.ones(B, 2)}
    method = Rows(dim={"x": 1}, output_dim={"z": 2})
    outputs = [{"z": each["x"].mT, "y": each["y"]} for each in method.split(batch, 3)]

    merged = method.merge(outputs, batch)

    assert_same(merged, {"z": batch["x"].mT, "y": batch["y"]})


def test_entries_of_the_batch_keep_their_dim() -> None:
    batch = {"x": sequence(), "y": torch.ones(B, 2)}
    method = Rows(dim={"x": 1})

    assert_same(method.merge(method.split(batch, 3), batch), batch)


@pytest.mark.parametrize(
    "dim, batch, message",
    [
        (1, {"x": torch.ones(5, 7), "y": torch.ones(5)}, "the same size in dim 0 and 1: got input"),
        (1, {"x": torch.ones(5, 7, 2), "m": torch.ones(7, 5)}, "Rows(dim={...}) gives the dim"),
        ({"z": 1}, {"x": torch.ones(5, 7)}, "the entries ['z'] must exist: got ['x']"),
        ({"x": 1}, {"x": torch.ones(5)}, "the entry 'x' must have its rows in dim 1: got"),
        (1, torch.tensor(1.0), "must hold a tensor with a batch dimension"),
    ],
)
@pytest.mark.parametrize("chunks", [1, 2])
def test_batch_that_does_not_fit(dim: Any, batch: Any, message: str, chunks: int) -> None:
    with pytest.raises(ValueError) as error:
        Rows(dim=dim).split(batch, chunks)

    assert message in str(error.value)


@pytest.mark.parametrize(
    "arguments, kind, message",
    [
        ({"dim": -1}, ValueError, "dim must count from 0"),
        ({"dim": {"x": -1}}, ValueError, "dim must count from 0"),
        ({"output_dim": -2}, ValueError, "output_dim must count from 0"),
        ({"dim": "x"}, TypeError, "dim must be an integer, the dim of the rows, or a dict"),
        ({"dim": True}, TypeError, "dim must be an integer"),
        ({"output_dim": {"x": None}}, TypeError, "output_dim must be an integer"),
    ],
)
def test_bad_argument(arguments: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        Rows(**arguments)


def test_name() -> None:
    assert str(Rows(dim={"x": 1}, output_dim=0)) == "Rows(at_least=1, dim={'x': 1}, output_dim=0)"
