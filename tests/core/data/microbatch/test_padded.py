"""Micro-batches of padded sequences are sorted by length, trimmed, and merged in order.

Here are also the tests of ``order``.
"""

import pickle
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_gpipe import PaddedSequences
from tests.support.models import assert_same, gradients
from tests.support.pipes import Pipe, every_mode

Tree = dict[str, Any]


def batch_of(lengths: list[int], longest: int | None = None) -> Tree:
    """Row k holds the values k*10, k*10 + 1, ...; padding is -1."""
    longest = max(lengths) if longest is None else longest
    tokens = torch.full((len(lengths), longest), -1)
    for k, length in enumerate(lengths):
        tokens[k, :length] = torch.arange(length) + 10 * k
    return {"tokens": tokens, "lengths": torch.tensor(lengths), "name": "batch"}


def microbatching(**more: Any) -> PaddedSequences:
    return PaddedSequences("lengths", **{"trim": ["tokens"], "pad_outputs": ["tokens"], **more})


def test_micro_batches_are_sorted_and_trimmed() -> None:
    first, second = microbatching().split(batch_of([2, 5, 1, 3]), 2)

    assert first["tokens"].tolist() == [[10, 11, 12, 13, 14]]
    assert second["tokens"].tolist() == [[30, 31, 32], [0, 1, -1], [20, -1, -1]]
    assert second["lengths"].tolist() == [3, 2, 1]
    assert first["name"] == second["name"] == "batch"


@pytest.mark.parametrize(
    "lengths, chunks, sizes",
    [
        ([8, 4, 2, 2, 2, 2], 3, [1, 2, 3]),
        ([6, 6, 6, 6], 2, [2, 2]),
        ([9, 1, 1, 1], 4, [1, 3]),  # more micro-batches would make none of them shorter
        ([1], 3, [1]),
        ([5, 5], 8, [1, 1]),
    ],
)
def test_micro_batches_have_about_as_many_tokens(
    lengths: list[int], chunks: int, sizes: list[int]
) -> None:
    microbatches = microbatching().split(batch_of(lengths), chunks)

    assert [len(each["tokens"]) for each in microbatches] == sizes


def test_batch_without_rows() -> None:
    batch = {"tokens": torch.zeros(0, 5), "lengths": torch.zeros(0, dtype=torch.long)}

    (microbatch,) = microbatching().split(batch, 3)

    assert microbatch["tokens"].shape[0] == 0
    assert microbatching().merge([microbatch], batch)["tokens"].shape == (0, 5)


def test_lengths_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    method, batch = microbatching(), batch_of([2, 5, 1, 3])
    microbatches = method.split(batch, 2)

    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "tolist", pytest.fail, raising=False)  # would wait for the device
        method.merge(microbatches, batch)
    batch["lengths"].fill_(1)

    assert [each["tokens"].shape[1] for each in method.split(batch, 2)] == [1, 1]


def test_same_lengths_with_other_padding() -> None:
    """Once the second batch was padded to the length of the first."""
    method, lengths = microbatching(), torch.tensor([2, 1])
    narrow, wide = ({"tokens": torch.ones(2, n), "lengths": lengths} for n in (3, 5))

    for batch in (narrow, wide, narrow):
        merged = method.merge(method.split(batch, 2), batch)
        assert merged["tokens"].shape == batch["tokens"].shape


def test_lengths_made_in_inference_mode() -> None:
    method = microbatching()
    with torch.inference_mode():
        batch = batch_of([1, 2], longest=4)
        method.split(batch, 2)
        batch["lengths"].fill_(4)

        assert [each["tokens"].size(1) for each in method.split(batch, 2)] == [4, 4]


def test_padding_value_of_another_type() -> None:
    method, batch = microbatching(padding_value=0.5), batch_of([1, 3])

    with pytest.raises(ValueError, match="padding_value must be a value of the outputs' type"):
        method.merge(method.split(batch, 2), batch)


def test_batch_padded_to_nothing() -> None:
    batch = {"tokens": torch.ones(2, 0), "lengths": torch.tensor([0, 0])}

    assert [each["tokens"].shape[1] for each in microbatching().split(batch, 2)] == [0]


def test_copies_and_name() -> None:
    method = microbatching()
    method.split(batch_of([1, 2]), 2)

    for copied in (pickle.loads(pickle.dumps(method)), deepcopy(method)):
        assert len(copied.split(batch_of([1, 2]), 2)) == 2
    assert str(method).startswith("PaddedSequences('lengths', trim=['tokens'], pad_outputs=[")


def test_order_of_the_batch() -> None:
    first, second = microbatching(sort=False).split(batch_of([2, 4, 1, 3]), 2)

    assert first["tokens"].shape == (2, 4)
    assert second["tokens"].tolist() == [[20, -1, -1], [30, 31, 32]]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=9),
    st.integers(1, 9),
    st.booleans(),
    st.integers(0, 2),
)
def test_split_and_merge_change_nothing_but_the_padding(
    lengths: list[int], chunks: int, sort: bool, more: int
) -> None:
    batch = batch_of(lengths, max(lengths) + more or 1)
    method = microbatching(sort=sort, padding_value=-1)

    merged = method.merge(method.split(batch, chunks), batch)

    assert_same(merged, batch)


def test_gradients_come_back_in_the_order_of_the_batch() -> None:
    method, batch = microbatching(), batch_of([2, 5, 1, 3])
    tokens = batch["tokens"].double().requires_grad_()
    weights = torch.randn(4, 5, dtype=torch.float64)

    merged = method.merge(method.split({**batch, "tokens": tokens}, 3), batch)
    (merged["tokens"] * weights).sum().backward()

    for k, length in enumerate([2, 5, 1, 3]):
        assert tokens.grad is not None
        assert torch.equal(tokens.grad[k, :length], weights[k, :length])


def test_sequence_of_no_length_keeps_a_place() -> None:
    (microbatch,) = microbatching().split(batch_of([0, 0], longest=3), 1)

    assert microbatch["tokens"].shape == (2, 1)


def test_output_of_one_tensor() -> None:
    method, batch = microbatching(pad_outputs=True), batch_of([1, 3])

    merged = method.merge([batch["tokens"][1:], batch["tokens"][:1, :1]], batch)

    assert merged.tolist() == [[0, 0, 0], [10, 11, 12]]


def test_output_without_a_length_is_not_padded() -> None:
    method, batch = microbatching(pad_outputs=False), batch_of([1, 3, 2])

    merged = method.merge([torch.tensor([[1.0], [2.0]]), torch.tensor([[0.0]])], batch)

    assert merged.tolist() == [[0.0], [1.0], [2.0]]


def test_outputs_without_rows_are_stacked_in_order() -> None:
    method, batch = microbatching(pad_outputs=False), batch_of([1, 3])

    assert method.merge([torch.tensor(3.0), torch.tensor(1.0)], batch).tolist() == [3.0, 1.0]


@dataclass
class Batch:
    tokens: Tensor
    lengths: Tensor


@pytest.mark.parametrize(
    "tree, lengths, trimmed",
    [
        ((torch.ones(2, 3), torch.tensor([1, 2])), 1, 0),
        (Batch(torch.ones(2, 3), torch.tensor([1, 2])), "lengths", "tokens"),
        ({"x": {"a": torch.ones(2, 3)}, "n": (torch.tensor([1, 2]),)}, "n", "x"),
    ],
    ids=["tuple", "dataclass", "nested"],
)
def test_entries_of_other_trees(tree: Any, lengths: Any, trimmed: Any) -> None:
    method = PaddedSequences(lengths, trim=[trimmed], pad_outputs=False)

    first, second = method.split(tree, 2)

    assert type(first) is type(tree)
    assert [_sequences(each).size(1) for each in (first, second)] == [2, 1]


def _sequences(tree: Any) -> Tensor:
    if isinstance(tree, Batch):
        return tree.tokens
    return tree["x"]["a"] if isinstance(tree, dict) else tree[0]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"lengths": None}, "the entry 'lengths' of the batch must be one tensor of integers"),
        ({"lengths": torch.ones(4)}, "got float32 of shape (4,)"),
        ({"lengths": torch.ones(4) > 0}, "got bool of shape (4,)"),
        ({"lengths": torch.tensor([1, 2, 3, 9])}, "must be between 0 and the padded length: got 1"),
        ({"lengths": torch.tensor([1, 2])}, "same size in dim 0"),
        (
            {"tokens": torch.ones(4)},
            "(rows, longest, ...): got {'tokens': 'float32 of shape (4,)'",
        ),
        ({"tokens": None}, "The entries are ['tokens', 'lengths', 'name']"),
    ],
)
def test_batch_that_does_not_fit(change: Tree, message: str) -> None:
    with pytest.raises(ValueError) as error:
        microbatching().split({**batch_of([1, 2, 3, 4]), **change}, 2)

    assert message in str(error.value)


@pytest.mark.parametrize(
    "padded, output, message",
    [
        (["logits"], {"x": torch.ones(2, 1)}, "the entries ['logits'] must exist: got ['x']"),
        (True, torch.ones(2, 9), "must have the shape (rows, up to 2, ...): got (2, 9)"),
        (True, torch.ones(2), "Name the entries that have it, or write pad_outputs=False"),
        (False, torch.ones(6, 2), "outputs must have the 2 rows of the batch"),
    ],
)
def test_output_that_does_not_fit(padded: Any, output: Any, message: str) -> None:
    with pytest.raises(ValueError) as error:
        microbatching(pad_outputs=padded).merge([output], batch_of([1, 2]))

    assert message in str(error.value)


def test_outputs_of_other_lengths_are_not_merged_unpadded() -> None:
    method, batch = microbatching(pad_outputs=False), batch_of([1, 3])

    with pytest.raises(ValueError, match="Name the entries to pad back .* pad_outputs="):
        method.merge([each["tokens"] for each in method.split(batch, 2)], batch)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"trim": "tokens"}, "trim must list the entries"),
        ({"trim": []}, "trim must list the entries"),
        ({"pad_outputs": "tokens"}, "pad_outputs must be True, False or the entries"),
    ],
)
def test_bad_argument(arguments: Tree, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        microbatching(**arguments)


class Smooth(nn.Module):
    """A recurrent layer that gives padding no influence."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(3, 3, batch_first=True)

    def forward(self, batch: Tree) -> Tree:
        x, _ = self.gru(batch["x"])
        inside = torch.arange(x.size(1)) < batch["lengths"].unsqueeze(1)
        return {**batch, "x": x * inside.unsqueeze(2)}


@every_mode
@pytest.mark.parametrize("sort", [True, False])
def test_pipeline_over_trimmed_micro_batches(sort: bool, pipe: Pipe) -> None:
    torch.manual_seed(3)
    module = nn.Sequential(*(Smooth() for _ in range(3))).double()
    trim = PaddedSequences("lengths", trim=["x"], pad_outputs=["x"], sort=sort)
    pipeline = pipe(module, microbatching=trim)
    lengths = torch.tensor([3, 7, 1, 5, 2, 2, 6])
    ends = []

    for each in (module, pipeline):
        x = torch.randn(7, 9, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        x.requires_grad_()
        each.zero_grad()
        y = each({"x": x, "lengths": lengths})
        y["x"].exp().mean().log().backward()
        ends.append((y, x.grad, {k: v.clone() for k, v in gradients(each).items()}))

    assert_same(ends[1], ends[0])
