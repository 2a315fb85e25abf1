import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from lightning_gpipe.core.frontends.install import install
from lightning_gpipe.core.pipeline import GPipe
from lightning_gpipe.core.verify.first_batch import VerifiedOnce
from lightning_gpipe.core.verify.parity import Parity
from tests.support.pipes import Pipe

X = torch.linspace(-1, 1, 8).reshape(4, 2)


@pytest.fixture
def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))


@pytest.fixture
def pipeline(layers: nn.Sequential, pipe: Pipe) -> GPipe:
    return pipe(layers, [2, 1], chunks=2, copy=False)


def verified(
    layers: nn.Sequential, pipeline: GPipe, on_result: Callable[[Parity], None]
) -> nn.Sequential:
    install(layers, VerifiedOnce(pipeline, layers, on_result))
    return layers


def test_first_input_in_training_is_verified_before_it_runs(
    layers: nn.Sequential, pipeline: GPipe
) -> None:
    def on_result(parity: Parity) -> None:
        parities.append(parity)
        assert pipeline.timeline is None, "the batch has not run"

    parities: list[Parity] = []
    expected = copy.deepcopy(layers)(X)
    model = verified(layers, pipeline, on_result)

    y = model(X)

    assert [(parity.microbatches, parity.difference) for parity in parities] == [(2, None)]
    torch.testing.assert_close(y, expected)
    assert pipeline.timeline is not None
    pipeline.timeline = None
    model(X)
    assert len(parities) == 1


def test_only_training_is_verified(layers: nn.Sequential, pipeline: GPipe) -> None:
    parities: list[Parity] = []
    model = verified(layers, pipeline, parities.append)

    model.eval()(X)
    with torch.no_grad():
        model.train()(X)
    assert not parities

    model(X)
    assert len(parities) == 1


def test_result_that_raises_reaches_the_caller_once(layers: nn.Sequential, pipeline: GPipe) -> None:
    def on_result(parity: Parity) -> None:
        raise RuntimeError("faulty")

    model = verified(layers, pipeline, on_result)

    with pytest.raises(RuntimeError, match="faulty"):
        model(X)
    assert pipeline.timeline is None
    assert model(X).shape == (4, 2)


def test_copy_is_not_verified(layers: nn.Sequential, pipeline: GPipe) -> None:
    parities: list[Parity] = []
    model = verified(layers, pipeline, parities.append)

    copy.deepcopy(model)(X)

    assert not parities
