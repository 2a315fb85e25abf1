import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from lightning_gpipe.core.pipeline import GPipe
from lightning_gpipe.core.verify.parity import Parity
from lightning_gpipe.core.verify.verification import FirstBatchVerifier
from tests.support.pipes import Pipe

X = torch.linspace(-1, 1, 8).reshape(4, 2)


@pytest.fixture
def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))


@pytest.fixture
def pipeline(layers: nn.Sequential, pipe: Pipe) -> GPipe:
    return pipe(layers, [2, 1], chunks=2, copy=False)


def verified(pipeline: GPipe, on_result: Callable[[Parity], None]) -> GPipe:
    FirstBatchVerifier(pipeline.piped_modules, on_result)
    return pipeline


def test_first_input_in_training_is_verified_before_it_runs(
    layers: nn.Sequential, pipeline: GPipe
) -> None:
    def on_result(parity: Parity) -> None:
        parities.append(parity)
        assert pipeline.timeline is None, "the batch has not run"

    parities: list[Parity] = []
    expected = copy.deepcopy(layers)(X)
    model = verified(pipeline, on_result)

    y = model(X)

    assert [(parity.microbatches, parity.difference) for parity in parities] == [(2, None)]
    torch.testing.assert_close(y, expected)
    assert pipeline.timeline is not None
    pipeline.engine.timeline = None
    model(X)
    assert len(parities) == 1


def test_only_training_is_verified(layers: nn.Sequential, pipeline: GPipe) -> None:
    parities: list[Parity] = []
    model = verified(pipeline, parities.append)

    layers.eval()
    model(X)
    layers.train()
    with torch.no_grad():
        model(X)
    assert not parities

    model(X)
    assert len(parities) == 1


def test_result_that_raises_reaches_the_caller_once(pipeline: GPipe) -> None:
    def on_result(parity: Parity) -> None:
        raise RuntimeError("faulty")

    model = verified(pipeline, on_result)

    with pytest.raises(RuntimeError, match="faulty"):
        model(X)
    assert pipeline.timeline is None
    assert model(X).shape == (4, 2)


def test_copy_is_not_verified(pipeline: GPipe) -> None:
    parities: list[Parity] = []
    model = verified(pipeline, parities.append)

    copy.deepcopy(model)(X)

    assert not parities
