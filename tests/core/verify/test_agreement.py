"""verify() finds no difference where there is none.

Here are also the tests of ``named_values`` and ``runs``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_gpipe import MicroBatching, PaddedSequences, verify, whole
from tests.support.models import (
    Attention,
    Call,
    Centred,
    Fork,
    Join,
    Through,
    Unused,
    perceptron,
    rows,
)
from tests.support.pipes import Pipe, every_mode, with_and_without_threads
from tests.support.unequal_models import (
    Coarse,
    Layers,
    Recurrent,
    W,
    counted,
    linear,
    sequences,
    sequential,
    verified,
)


class Tied(nn.Module):
    """Two layers' worth of one weight."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight)


class ReadsRate(nn.Module):
    """Uses a dropout for its rate, as attention written by hand does."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout.p, self.training)


def frozen(layer: nn.Module) -> nn.Module:
    return layer.requires_grad_(False)


def tied() -> Layers:
    weight = nn.Parameter(torch.randn(W, W))
    return [linear(), Tied(weight), nn.Tanh(), Tied(weight)]


def tokens() -> Tensor:
    return torch.arange(21).reshape(7, 3) % 5


GOOD: dict[str, tuple[Callable[[], Layers], Callable[[], Any]]] = {
    "perceptron": (lambda: list(perceptron()), lambda: rows(7)),
    "convolution": (
        lambda: [nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2)],
        lambda: torch.randn(7, 2, 6, 6, dtype=torch.float64, requires_grad=True),
    ),
    "trees": (lambda: [Fork(W), Through(linear()), Join()], lambda: rows(7)),
    "tree as output": (lambda: [linear(), Fork(W)], lambda: rows(7)),
    "number as output": (lambda: [linear(), Call(lambda x: (x, 3, "name"))], lambda: rows(7)),
    "edit in place": (
        lambda: [nn.ReLU(inplace=True), linear(), nn.ReLU(inplace=True)],
        lambda: rows(7),
    ),
    "attention": (lambda: [Attention(W), nn.LayerNorm(W)], sequences),
    "embedding": (lambda: [nn.Embedding(5, W), linear()], tokens),
    "sparse gradient": (lambda: [nn.Embedding(5, W, sparse=True), linear()], tokens),
    "shared weight": (tied, lambda: rows(7)),
    "frozen layer": (lambda: [linear(), frozen(linear()), linear()], lambda: rows(7)),
    "nothing to train": (lambda: [frozen(linear()), nn.Tanh()], lambda: rows(7).detach()),
    "unused parameter": (lambda: [linear(), Unused(W)], lambda: rows(7)),
    "complex": (lambda: [linear(), Call(torch.fft.fft)], lambda: rows(7)),
    "not a number": (lambda: [linear(), Call(lambda x: x.log())], lambda: rows(7)),
    "whole tensor": (
        lambda: [Call(lambda x: (x[0] @ x[1], x[1])), Through(linear())],
        lambda: (rows(7), whole(rows(W))),
    ),
    "numbers of rows between layers": (
        lambda: [linear(), Call(counted), Call(lambda x: x[0].reshape(x[1], 1, W))],
        lambda: rows(7),
    ),
    "dropouts": (
        lambda: [nn.Dropout(inplace=True), linear(), nn.AlphaDropout(), ReadsRate(), nn.Dropout()],
        lambda: rows(7),
    ),
    "dropout within layers": (
        lambda: [
            nn.TransformerEncoderLayer(W, 1, W, dropout=0.5, batch_first=True),
            Recurrent(),
        ],
        sequences,
    ),
    "shapes that depend on the rows": (
        lambda: [linear(), Call(lambda x: x.repeat(1, x.size(0))), Call(lambda x: x[:, :W])],
        lambda: rows(7),
    ),
    "parameter hidden in a function": (
        lambda: [frozen(linear()), Call(torch.ones(W, dtype=torch.float64).requires_grad_().mul)],
        lambda: rows(7).detach(),
    ),
    "fewer rows than chunks": (lambda: list(perceptron()), lambda: rows(2)),
}


@pytest.mark.parametrize("name", GOOD)
def test_good_pipeline_has_no_difference(name: str) -> None:
    layers, batch = GOOD[name]

    parity = verified(*layers(), batch=batch())

    assert parity.difference is None, str(parity)
    assert not parity.explained
    parity.check()


@every_mode
@with_and_without_threads
@pytest.mark.parametrize("stages", [1, 4])
def test_every_way_to_run(stages: int, pipe: Pipe) -> None:
    parity = verify(pipe(perceptron(), stages=stages), rows(7))

    assert parity.difference is None
    assert parity.microbatches == 3


def test_everything_promised_is_compared() -> None:
    class Averages(nn.Module):
        average: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("average", torch.ones(W))

        def forward(self, x: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
            return x["a"] + self.average, x["b"].argmax(-1)

    parity = verified(
        nn.Identity(),
        Averages(),
        Through(linear()),
        batch={"a": rows(7), "b": rows(7).detach()},
    )

    assert {kind: [each.name for each in found] for kind, found in parity.compared.items()} == {
        "output": ["[0]", "[1]"],
        "gradients": ["2.layer.weight", "2.layer.bias"],
        "buffers": ["1.average"],
        "input gradients": ["['a']"],
        "loss terms": [],
    }


def test_batch_norm_in_eval_mode_is_no_difference(pipe: Pipe) -> None:
    pipeline = pipe(sequential(linear(), nn.BatchNorm1d(W), linear())).eval()

    assert verify(pipeline, rows(7)).difference is None


def test_without_gradients_only_the_rest_is_compared() -> None:
    with torch.no_grad():
        parity = verified(*perceptron())

    assert parity.difference is None
    assert [len(found) for found in parity.compared.values()] == [1, 0, 0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    layers = [nn.Sequential(linear(), Call(lambda x: x.float())) for _ in range(2)]
    with torch.autocast("cpu", dtype):
        parity = verified(*layers, batch=rows(7).float(), dtype=torch.float32)

    assert parity.difference is None
    assert parity.tolerance == 5e-2, "though every layer returns float32"


def test_backward_comes_after_autocast() -> None:
    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            seen.add(torch.is_autocast_enabled("cpu"))
            return gradient

    seen: set[bool] = set()
    with torch.autocast("cpu", torch.bfloat16):
        verified(linear(), Call(Looks.apply), batch=rows(7).float(), dtype=torch.float32)

    assert seen == {False}


def test_callers_hooks_on_saved_tensors_apply_to_both_runs() -> None:
    def pack(tensor: Tensor) -> Tensor:
        rows_saved.add(tensor.size(0))
        return tensor

    rows_saved: set[int] = set()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        verified(nn.Tanh(), nn.Tanh())

    assert {2, 7} <= rows_saved


@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float64, 1e-9), (torch.float32, 1e-4), (torch.bfloat16, 5e-2)]
)
def test_tolerance_goes_by_the_lowest_precision(dtype: torch.dtype, tolerance: float) -> None:
    lower = nn.Sequential(Call(lambda x: x.to(dtype)), Call(lambda x: x.double()))

    assert verified(linear(), *lower, linear()).tolerance == tolerance


def test_tolerance_of_the_caller(pipe: Pipe) -> None:
    assert verified(linear(), Coarse()).difference is not None

    pipeline = pipe(sequential(linear(), Coarse()))
    assert verify(pipeline, rows(7), tolerance=0.1).difference is None


def test_gradient_that_is_zero_but_for_rounding_is_none() -> None:
    class Rounded(torch.autograd.Function):
        """The identity, with a gradient that is rounded in another way for few rows."""

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient + 1e-14 * (gradient.size(0) < 4)

    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            shifts = Rounded.apply(self.shift.expand(x.size(0), 1))
            return x + shifts  # the normalisation takes it away again

    parity = verified(linear(), Shift(), nn.LayerNorm(W, eps=0.0), linear())

    assert parity.difference is None
    (shift,) = [each for each in parity.compared["gradients"] if each.name == "1.shift"]
    assert 0 < shift.absolute < 1e-12


# Micro-batches that are not rows.

PADDED = PaddedSequences("lengths", trim=["x"], pad_outputs=["x"], padding_value=5.0)


def padded_batch() -> dict[str, Tensor]:
    lengths = torch.tensor([2, 5, 1, 4, 3, 3, 2])
    x = torch.randn(7, 5, W, dtype=torch.float64)
    return {"x": x.requires_grad_(), "lengths": lengths}


class PerStep(nn.Module):
    """Works on each step of a sequence by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(W, W)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**batch, "x": self.linear(batch["x"])}


class OverPadding(PerStep):
    """Lets the padding take part in a mean."""

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**batch, "x": batch["x"] - batch["x"].mean(1, keepdim=True)}


def test_padding_is_not_compared() -> None:
    parity = verified(PerStep(), PerStep(), batch=padded_batch(), microbatching=PADDED)

    assert parity.difference is None, str(parity)
    assert [len(found) for found in parity.compared.values()] == [2, 4, 0, 1, 0]


def test_padding_with_influence_is_found_but_not_its_layer() -> None:
    layers = [PerStep(), OverPadding(), PerStep()]

    parity = verified(*layers, batch=padded_batch(), microbatching=PADDED)

    assert parity.difference is not None
    assert (parity.difference.kind, parity.difference.layer) == ("output", None)
    assert (
        "The cause is in one of the layers 0..2, whose own outputs could not be compared."
    ) in str(parity)


class Interleaved(MicroBatching):
    def split(self, batch: Any, chunks: int) -> list[Any]:
        return [batch[i::chunks] for i in range(chunks)]

    def merge(self, outputs: Any, batch: Any) -> Any:
        merged = outputs[0].new_empty(len(batch), *outputs[0].shape[1:])
        for i, output in enumerate(outputs):
            merged[i :: len(outputs)] = output
        return merged


def test_microbatching_of_the_user() -> None:
    assert verified(*perceptron(), microbatching=Interleaved()).difference is None
    assert verified(linear(), Centred(), microbatching=Interleaved()).difference is not None
