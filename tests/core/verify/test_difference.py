"""verify() finds what differs, where it begins, and why it must where that is known.

Here are also the tests of ``parity``.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe import verify, whole
from tests.support.models import Call, Centred, Counting, Through, perceptron, rows
from tests.support.pipes import Pipe
from tests.support.unequal_models import (
    Coarse,
    Layers,
    W,
    counted,
    functional_dropout,
    linear,
    verified,
)


class _Divided(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.rows = x.size(0)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / ctx.rows


class Divided(nn.Module):
    """Has a backward that depends on the number of rows."""

    def forward(self, x: Tensor) -> Tensor:
        return _Divided.apply(x)


class Retyped(nn.Module):
    """Returns another type for few rows."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.size(0) > 4 else x.float()


FAULTS: dict[str, tuple[Callable[[], nn.Module], str, int, range]] = {
    "other rows": (Centred, "output", 2, range(2, 3)),
    "less precision": (Coarse, "output", 2, range(2, 3)),
    "another type": (Retyped, "output", 2, range(2, 3)),
    "backward": (Divided, "gradients", 1, range(1, 5)),
    "buffer": (Counting, "buffers", 2, range(2, 3)),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_found(name: str) -> None:
    fault, kind, layer, suspects = FAULTS[name]

    parity = verified(linear(), linear(), fault(), Call(lambda x: x.double()), linear())

    difference = parity.difference
    assert difference is not None
    assert (difference.kind, difference.layer, difference.suspects) == (kind, layer, suspects)
    assert not parity.explained
    with pytest.raises(RuntimeError, match=re.escape(difference.value)):
        parity.check()


def test_fault_of_the_first_backward_shows_in_the_gradient_of_the_input() -> None:
    difference = verified(Divided(), nn.Tanh(), linear(), linear()).difference

    assert difference is not None
    assert (difference.kind, difference.layer) == ("input gradients", None)
    assert difference.suspects == range(3), "backward was seen to be right up to layer 2"


def test_layer_whose_own_output_cannot_be_put_together_is_suspected_too() -> None:
    def shapes(x: Tensor) -> dict[int, Tensor]:
        return {x.size(0): x - x.mean(0)}

    parity = verified(linear(), Call(shapes), Call(lambda x: next(iter(x.values()))), linear())

    assert parity.difference is not None
    assert (parity.difference.layer, parity.difference.suspects) == (2, range(1, 3))
    assert "The cause is in one of the layers 1..2." in str(parity)


@pytest.mark.filterwarnings("ignore:an output of layers should have a row per sample")
def test_one_number_for_the_batch_is_named() -> None:
    difference = verified(linear(), Call(lambda x: x.mean())).difference

    assert difference is not None and difference.layer == 1
    assert str(difference.deviation) == "is float64 of shape (3,) instead of float64 of shape ()"


@pytest.mark.parametrize("chunks", [2, 4])
def test_numbers_of_rows_between_layers_are_not_taken_for_the_fault(chunks: int) -> None:
    layers = [linear(), Call(counted), Call(lambda x: x[0]), Centred(), linear()]

    difference = verified(*layers, batch=rows(6), chunks=chunks).difference

    assert difference is not None
    assert (difference.layer, difference.suspects) == (3, range(3, 4))


def test_whole_tensor_between_layers_is_not_taken_for_the_fault() -> None:
    layers = [Call(lambda x: (x[0] @ x[1], x[1])), Through(Centred())]

    difference = verified(*layers, batch=(rows(7), whole(rows(W)))).difference

    assert difference is not None
    assert (difference.layer, difference.suspects) == (1, range(1, 2))


def test_number_of_rows_as_output_is_a_difference() -> None:
    difference = verified(linear(), Call(counted), nn.Identity(), batch=rows(6)).difference

    assert difference is not None
    assert str(difference.deviation) == "differs by up to 4 (relative: 6.7e-01)"
    assert (difference.deviation.name, difference.layer) == ("[1]", None)
    assert difference.suspects == range(3), "where it comes from is not seen"


def test_parameter_that_only_one_run_uses() -> None:
    class Picks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.few, self.many = nn.Parameter(torch.zeros(W)), nn.Parameter(torch.zeros(W))

        def forward(self, x: Tensor) -> Tensor:
            return x + (self.many if x.size(0) > 4 else self.few)

    difference = verified(linear(), Picks(), linear()).difference

    assert difference is not None and difference.layer == 1
    assert "'1.many'" in difference.value
    assert str(difference.deviation) == "is present in the plain run only"


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch.compile looks at it
@pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0")  # torch.compile
def test_layers_compiled_in_place() -> None:
    layers = [linear(), Centred(), linear()]
    for layer in layers:
        layer.compile(backend="eager")

    difference = verified(*layers).difference

    assert difference is not None and difference.layer == 1


# Differences with a known reason.


class OneLayer(nn.Sequential):
    """Has a forward of its own, so that its layers do not count by themselves."""

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = super().forward(input)
        return output


@pytest.mark.parametrize(
    "layer, reason",
    [
        (lambda: nn.BatchNorm1d(W), "layer 1 has a BatchNorm1d, which normalises by micro-batch"),
        (
            lambda: nn.BatchNorm1d(W, track_running_stats=False).eval(),
            "layer 1 has a BatchNorm1d, which normalises by micro-batch",
        ),
        (functional_dropout, "layer 1 draws random numbers, others for each micro-batch"),
        (
            lambda: OneLayer(nn.BatchNorm1d(W), functional_dropout()),
            "layer 1 has a BatchNorm1d, which normalises by micro-batch; "
            "layer 1 draws random numbers, others for each micro-batch",
        ),
    ],
)
def test_known_reason(layer: Callable[[], nn.Module], reason: str) -> None:
    parity = verified(linear(), layer(), linear())

    assert parity.difference is not None
    assert parity.difference.layer == 1
    assert (
        parity.difference.reason
        == f"{reason}. To find other differences, call verify() in eval mode"
    )
    assert parity.explained
    parity.check()


@pytest.mark.parametrize("draw", [random.random, np.random.random], ids=["python", "numpy"])
def test_layer_that_draws_elsewhere(draw: Callable[[], float]) -> None:
    """It draws the same in every plain run, because the generators of libraries are restored."""
    parity = verified(linear(), Call(lambda x: x * draw()), threads=False)

    assert parity.difference is not None
    assert "layer 1 draws random numbers" in str(parity.difference.reason)
    assert parity.explained


@pytest.mark.parametrize(
    "layers",
    [
        lambda: [Centred(), nn.BatchNorm1d(W), functional_dropout()],
        lambda: [nn.BatchNorm1d(W).eval(), Centred()],
    ],
    ids=["after the difference", "in eval mode"],
)
def test_what_is_no_reason(layers: Callable[[], Layers]) -> None:
    parity = verified(linear(), *layers())

    assert parity.difference is not None
    assert not parity.explained


def rounds(x: Tensor) -> Tensor:
    """Ends in other last bits for few rows."""
    return x if x.size(0) > 4 else x * (1 + 2**-52)


def amplify(x: Tensor) -> Tensor:
    return torch.sin(1e16 * x)


@pytest.mark.parametrize("last", [linear, lambda: Call(lambda x: (x, x > 0))])
def test_rounding_that_layers_amplify(last: Callable[[], nn.Module]) -> None:
    parity = verified(linear(), Call(rounds), Call(amplify), last())

    assert parity.difference is not None and parity.explained
    assert "rounding alone changes it about as much" in str(parity.difference.reason)
    assert f"There is a known reason: {parity.difference.reason}." in str(parity)


def test_fault_before_layers_that_amplify_rounding() -> None:
    parity = verified(linear(), Coarse(), Call(amplify), linear())

    assert parity.difference is not None and parity.difference.layer == 1
    assert not parity.explained


def test_buffer_that_counts_is_not_excused_by_amplified_rounding() -> None:
    parity = verified(linear(), Counting(), Call(rounds), Call(amplify), linear())

    assert parity.difference is not None and parity.difference.kind == "buffers"
    assert not parity.explained


# Messages.


def test_message_of_agreement() -> None:
    assert re.fullmatch(
        r"verified: a plain run and one in 3 micro-batches agree\. Largest differences, relative: "
        r"output \(1\) \S+, gradients \(4\) \S+, input gradients \(1\) \S+; allowed: 1\.0e-09",
        str(verified(*perceptron())),
    )


def test_message_of_a_difference(pipe: Pipe) -> None:
    module = nn.Sequential()
    module.add_module("first", linear())
    module.add_module("centre", Call(lambda x: x + (x.size(0) < 4)))

    message = str(verify(pipe(module.double()), rows(7)))

    assert re.fullmatch(
        r"a pipeline must compute what its layers compute on the whole batch: between a plain run "
        r"and one in 3 micro-batches, the output of layer 1 \('centre', Call, stage 1, cpu\) "
        r"differs by up to 1 \(relative: \S+\)\. A layer must treat each row by itself, whatever "
        r"rows came before: move what it computes from several rows, or from their number, out of "
        r"the nn\.Sequential\.\n"
        r"Largest differences, relative: output \(1\) \S+, gradients \(2\) \S+, "
        r"input gradients \(1\) \S+; allowed: 1\.0e-09",
        message,
    )
