"""Transparency: the result of a step by micro-batches is that of the whole batch."""

from collections import namedtuple
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from lightning_gpipe.core.data import MicroBatching, PaddedSequences, Rows, map_instances
from lightning_gpipe.core.pipeline import Outcome
from lightning_gpipe.strategy.step_results import Sizes, note_sizes, result_of
from tests.support.models import assert_same

Pair = namedtuple("Pair", ["first", "second"])


X = torch.randn(7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
SIZES = [2, 2, 2, 1]
WEIGHTS = [3.0, 0.0, 1.0, 2.0]
KINDS = {
    "tensor": lambda x: x,
    "tuple": lambda x: (x, x.exp()),
    "named tuple": lambda x: Pair(x, len(x)),
    "list": lambda x: [x, x.exp(), x.sin()],
    "nested": lambda x: {"deep": (x, [{"x": x}] * 3)},
    "array": lambda x: x.numpy(),
    "array of no dims": lambda x: x.numpy().mean(),
    "count": lambda x: (x > 0).sum(),
    "counts in a tuple": lambda x: ((x > 0).sum(), (x <= 0).sum()),
    "integer": lambda x: int((x > 0).sum()),
    "rows": len,
    "mean": lambda x: x.mean(),
    "means in a tuple": lambda x: (x.mean(), float(x.mean())),
    "strings of rows": lambda x: [f"{row}" for row in x.tolist()],
    "strings of rows, in a tuple": lambda x: tuple(f"{row}" for row in x.tolist()),
    "the same string for each row": lambda x: ["row"] * len(x),
    "values of rows": lambda x: x.sum(1).tolist(),
    "tensors of rows": lambda x: list(x),
    "setting": lambda x: ("adam", None, True),
    "empty": lambda x: ([], {}, ()),
}


def joined(function: Any, weights: list[float], sizes: list[int] = SIZES, verified: int = 0) -> Any:
    """The joined results of ``function``, which had run on so many rows for a verification."""
    loss = torch.zeros(())
    x = X[: sum(sizes)]
    results = [{"loss": loss, "found": function(piece)} for piece in x.split(sizes)]
    merge = partial(Rows().merge_results, batch=x)
    known: Sizes = {}
    if verified:
        note_sizes(known, verified, {"found": function(X[:verified])})
    return result_of(Outcome(loss, results, tuple(sizes), weights, merge), sizes=known)["found"]


def as_tensors(tree: Any) -> Any:
    for kind in (float, np.float64, np.ndarray):
        tree = map_instances(kind, partial(torch.as_tensor, dtype=torch.float64), tree)
    return tree


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [SIZES, [2, 2, 2]], ids=["uneven", "even"])
def test_same_as_of_the_batch(kind: str, sizes: list[int]) -> None:
    """Structures with tensors ended the fit with "Boolean value of Tensor is ambiguous"."""
    function = KINDS[kind]

    found = joined(function, list(map(float, sizes)), sizes, verified=4)

    expected = function(X[: sum(sizes)])
    assert type(found) is type(expected) or kind == "array of no dims"
    assert_same(as_tensors(found), as_tensors(expected))


def test_floats_are_weighted_as_the_losses() -> None:
    """They were weighted by rows; the mean of nothing is no number, and had no weight."""
    means = iter([1.0, float("nan"), 2.0, 4.0])

    assert joined(lambda _: next(means), WEIGHTS) == pytest.approx((3 + 2 + 8) / 6)


def test_weights_are_added() -> None:
    loss = torch.zeros(())
    results = [{"loss": loss, "loss_weight": torch.tensor(n)} for n in (3, 4)]

    found = result_of(Outcome(loss, results, None, [3.0, 4.0], list))

    assert found == {"loss": loss, "loss_weight": torch.tensor(7)}


def test_integer_that_may_be_a_count() -> None:
    with pytest.warns(UserWarning, match=r"in \['found'\], which is taken as the same"):
        assert joined(lambda _: 5, WEIGHTS) == 5


def test_integer_as_large_as_each_micro_batch() -> None:
    """A constant was added up without a word where it was as large as the micro-batches."""
    with pytest.warns(UserWarning, match=r"a number of rows: got 2 .* in \['found'\]\. .* added"):
        assert joined(lambda _: 2, [1.0] * 3, [2, 2, 2]) == 6
    with pytest.warns(UserWarning, match=r"\['classes'\], which is taken as the same"):
        found = joined(lambda x: {"classes": 2, "rows": len(x)}, [1.0] * 3, [2, 2, 2], verified=4)
    assert found == {"classes": 2, "rows": 6}


def test_constant_float_is_not_rounded() -> None:
    """1e-4 came back as 9.999999999999999e-05."""
    assert joined(lambda _: [1e-4, 1.5], WEIGHTS, [2, 2, 2, 1]) == [1e-4, 1.5]


NO_ROWS = {
    "states of layers": lambda x: x[None].expand(3, -1, -1)[:, :1],
    "confusion matrix": lambda x: x.T @ x,
    "histogram": lambda x: torch.histc(x, 5),
    "mean per feature": lambda x: x.mean(0).numpy(),
    "one number": lambda x: x.sum().reshape(1),
    "first row": lambda x: x[:1],
}


@pytest.mark.parametrize("kind", NO_ROWS)
@pytest.mark.parametrize("sizes, verified", [(SIZES, 0), ([2, 2, 2], 4), ([1] * 7, 4)])
def test_tensors_without_rows(kind: str, sizes: list[int], verified: int) -> None:
    """They were concatenated without a word."""
    function = NO_ROWS[kind]

    with pytest.warns(UserWarning, match=r"rows of its micro-batch in dim 0: .* in \['found'\]\."):
        found = joined(function, [1.0] * len(sizes), sizes, verified)

    assert len(found) == len(sizes) * len(function(X))


def test_tensor_as_large_as_each_micro_batch() -> None:
    """A verification on other numbers of rows shows that it has none."""
    with pytest.warns(UserWarning, match="got size 2, whatever their number is"):
        joined(lambda x: x[:, :2].T @ x, [1.0] * 3, [2, 2, 2], verified=4)


@pytest.mark.parametrize("sizes", [SIZES, [2, 2, 2], [1] * 7])
@pytest.mark.parametrize("verified", [0, 4])
def test_several_or_some_rows_are_concatenated(sizes: list[int], verified: int) -> None:
    """Of tokens in one dim with the rows, and of rows that are left out."""
    x = X[: sum(sizes)]

    def step(x: torch.Tensor) -> Any:
        return {"tokens": x.flatten(), "some": x[x[:, 0] > 0], "none": x[:0]}

    found = joined(step, [1.0] * len(sizes), sizes, verified)

    assert_same(found, step(x))


def test_tensors_of_other_shapes() -> None:
    """The error was that of ``torch.cat``, which names no entry."""
    message = r"training_step .* got shapes \[\(3, 2\), .* of \[2, 2, 2, 1\] rows, in \['found'\]\."
    with pytest.raises(ValueError, match=message):
        joined(lambda x: x.T, WEIGHTS)


def test_number_of_the_batch_that_is_as_large_as_a_micro_batch() -> None:
    """Once ``batch_idx`` came back as the sum of itself, in one batch of an epoch."""
    others = set[str]()
    sizes: Sizes = {"['rows']": {(4, (4,))}}
    found = []
    for batch_idx in range(4):
        results = [{"loss": torch.zeros(()), "idx": batch_idx, "rows": 2} for _ in range(3)]
        outcome = Outcome(torch.zeros(()), results, (2, 2, 2), [1.0] * 3, list)
        result = result_of(outcome, [batch_idx], others, sizes)
        found.append((result["idx"], result["rows"]))

    assert found == [(0, 6), (1, 6), (2, 6), (3, 6)]


def split_and_joined(microbatching: MicroBatching, batch: Any, function: Any) -> Any:
    """The joined results of a step that returns what ``function`` does of a micro-batch."""
    pieces = microbatching.split(batch, 3)
    division = microbatching.division(pieces)
    assert division is not None
    results = [{"loss": torch.zeros(()), "found": function(piece)} for piece in pieces]
    merge = partial(microbatching.merge_results, batch=batch)
    outcome = Outcome(torch.zeros(()), results, division.sizes, [1.0] * len(pieces), merge)
    return result_of(outcome)["found"]


def test_order_of_sorted_rows() -> None:
    """Results were in the order of the lengths, beside a batch in its own."""
    lengths = torch.tensor([1, 4, 2, 4, 3, 1, 2])
    batch = {"x": torch.arange(28.0).view(7, 4), "lengths": lengths, "names": list("abcdefg")}
    padded = PaddedSequences("lengths", trim=["x"], pad_outputs=False)

    def step(piece: Any) -> Any:
        first = piece["x"][:, 0]
        names = [str(int(x)) for x in first]
        return {"x": first, "array": first.numpy(), "list": first.tolist(), "names": names}

    found, expected = split_and_joined(padded, batch, step), step(batch)

    assert_same(as_tensors(found), as_tensors(expected))


def test_results_with_rows_in_another_dim() -> None:
    """Results with rows in dim 1 were concatenated in dim 0."""
    x = torch.arange(35.0).view(5, 7, 1)

    found = split_and_joined(Rows(dim=1), x, lambda x: {"x": x, "row": x[0]})
    assert_same(found, {"x": x, "row": x[0]})
    with pytest.raises(ValueError, match=r"in which dim a result .* shapes \[\(3, 3, 1\)"):
        split_and_joined(Rows(dim=1), x, lambda x: x[: x.size(1)])
