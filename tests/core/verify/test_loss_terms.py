"""verify() compares the loss terms that layers hand out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe import collect_loss_terms, loss_term, verify
from tests.support.models import rows
from tests.support.pipes import Pipe, every_mode, with_and_without_threads
from tests.support.unequal_models import W, linear, sequential, verified


class Penalised(nn.Linear):
    """Hands out a penalty, a mean over rows unless another function of them is given."""

    def __init__(self, function: Any = torch.mean, **options: Any) -> None:
        super().__init__(W, W)
        self.function = function
        self.options = {"reduction": "mean"} | options

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        loss_term("penalty", self.function(y.square()), **self.options)
        return y


@every_mode
@with_and_without_threads
def test_loss_terms_agree(pipe: Pipe) -> None:
    layers = [Penalised(), nn.Tanh(), Penalised(torch.mean)]

    parity = verify(pipe(sequential(*layers)), rows(7))

    assert parity.difference is None
    assert [each.name for each in parity.compared["loss terms"]] == ["penalty"]


@pytest.mark.parametrize(
    "layer",
    [
        lambda: Penalised(lambda y: y.mean() ** 2),
        lambda: Penalised(torch.sum),
        lambda: Penalised(lambda y: y.sum() / len(y), reduction="sum"),
    ],
    ids=["no mean", "a sum", "a mean"],
)
def test_term_that_is_not_reduced_as_it_should_be(layer: Any) -> None:
    parity = verified(linear(), nn.Tanh(), layer(), linear())

    assert parity.difference is not None
    assert parity.difference.kind == "loss terms"
    assert parity.difference.layer == 2
    assert "the loss term 'penalty' of layer 2 ('2', Penalised, stage 1, cpu) differs" in str(
        parity
    )
    assert parity.explained, "a term may be meant for each micro-batch: a warning"


def test_terms_of_several_layers_are_one() -> None:
    parity = verified(linear(), Penalised(torch.sum), nn.Tanh(), Penalised(torch.sum))

    assert parity.difference is not None
    assert parity.difference.suspects == range(1, 4)


def test_other_differences_come_first() -> None:
    class Centred(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(0)

    parity = verified(linear(), Penalised(torch.sum), Centred())

    assert parity.difference is not None and parity.difference.kind == "output"


def test_terms_of_a_verification_are_not_the_callers(pipe: Pipe) -> None:
    pipeline = pipe(sequential(Penalised(), linear()))

    with collect_loss_terms() as terms:
        verify(pipeline, rows(7))

    assert terms == {}


def test_without_gradients() -> None:
    with torch.no_grad():
        assert verified(linear(), Penalised()).difference is None
