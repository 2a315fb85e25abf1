"""The model is recorded in the middle of a fit: by a logger, and for deployment."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_gpipe import GPipeStrategy
from tests.support.lightning_modules import FEATURES, Classifier, assert_same_weights, fitted
from tests.support.models import assert_same

pytestmark = [
    # torch's; on Python 3.14 and later tracing is "not supported" instead of "deprecated".
    pytest.mark.filterwarnings("ignore:`torch.jit.* is (deprecated|not supported)"),
    # torchmetrics', of an attribute that torch.jit.trace reads.
    pytest.mark.filterwarnings("ignore:This property will be removed in 2.0.0"),
]

X = torch.linspace(-1, 1, 5 * FEATURES, dtype=torch.float64).reshape(5, FEATURES)


def build() -> Classifier:
    model = Classifier()
    model.example_input_array = X
    return model


def test_graph_for_tensorboard(tmp_path: Path) -> None:
    """Once tracing crashed in the pipeline, and ended the fit."""
    pytest.importorskip("tensorboard")
    options: dict[str, Any] = {
        "logger": TensorBoardLogger(tmp_path, log_graph=True),
        "log_every_n_steps": 1,
    }
    plain = fitted(tmp_path, build=build)

    pipelined = fitted(tmp_path, GPipeStrategy([2, 4], 3), build=build, devices=2, **options)

    assert_same_weights(pipelined, plain)


Record = Callable[[Any], Callable[[torch.Tensor], torch.Tensor]]


def traced(model: Any) -> Any:
    return model.to_torchscript(method="trace", example_inputs=X)


def exported(model: Any) -> Any:
    return torch.export.export(model, (X,), strict=False).module()


@pytest.mark.filterwarnings("ignore:.*to_torchscript. has been deprecated")
@pytest.mark.parametrize("record", [traced, exported])
@pytest.mark.parametrize("verify", [False, True])
def test_model_recorded_in_the_middle_of_a_fit(
    tmp_path: Path, record: Record, verify: bool
) -> None:
    class Records(L.Callback):
        def on_train_batch_start(
            self, trainer: L.Trainer, model: Any, batch: Any, batch_idx: int
        ) -> None:
            if not outputs:
                outputs.append((record(model)(X).detach(), model(X).detach()))

    outputs: list[tuple[torch.Tensor, torch.Tensor]] = []
    plain = fitted(tmp_path, build=build)
    strategy = GPipeStrategy([2, 4], chunks=3, verify=verify)

    pipelined = fitted(tmp_path, strategy, build=build, devices=2, callbacks=[Records()])

    assert_same_weights(pipelined, plain)
    assert_same(*outputs[0])
