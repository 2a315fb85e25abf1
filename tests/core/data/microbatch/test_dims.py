"""Promise: a batch whose rows are not in dim 0 is split where they are, and merged likewise."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe import Rows
from tests.support.models import assert_same, assert_same_step, assert_same_steps
from tests.support.pipes import Pipe, every_mode, with_and_without_threads

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


def test_micro_batches_of_two_rows_at_least() -> None:
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
