"""Optimizers, clipping and gradient scaling over parameters on several GPUs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import BaseFinetuning, Callback, ModelPruning
from lightning.pytorch.utilities import grad_norm
from torch import Tensor

from tests.gpu.trainers import Build, Deep, on_many_gpus, on_two_and_many_gpus, piped, plain
from tests.support.lightning_modules import Classifier, assert_same_weights, weights

Make = Callable[[Any], torch.optim.Optimizer]


class Looks(Callback):
    """Notes where the tensors of optimizers are, and where their parameters."""

    def __init__(self) -> None:
        self.places: set[tuple[torch.device, torch.device]] = set()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        for optimizer in trainer.optimizers:
            for parameter, state in optimizer.state.items():
                for value in state.values():
                    if isinstance(value, Tensor) and value.dim() > 0:  # counters are on the CPU
                        self.places.add((parameter.device, value.device))

    def check(self, gpus: int) -> None:
        devices = [torch.device("cuda", k) for k in range(gpus)]
        assert self.places == {(device, device) for device in devices}


def built(make: Make) -> Build:
    """Makes modules with this optimizer."""

    class Optimized(Deep):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return make(self.parameters())

    return Optimized


# Optimizers.

ADAM: list[dict[str, Any]] = [
    {"fused": True},
    {"foreach": True},
    {"foreach": False},
    {"capturable": True, "foreach": True},
    {"capturable": True, "foreach": False},
]


@pytest.mark.parametrize("options", ADAM, ids=str)
@on_many_gpus
def test_adam(tmp_path: Path, gpus: int, options: dict[str, Any]) -> None:
    looks = Looks()
    build = built(lambda parameters: torch.optim.Adam(parameters, lr=0.01, **options))

    pipelined = piped(tmp_path, gpus, build=build, callbacks=[looks])

    # 1e-6: where a gradient is nearly 0, Adam divides rounding errors by one another.
    torch.testing.assert_close(
        weights(pipelined), weights(plain(tmp_path, build)), rtol=1e-6, atol=1e-9
    )
    looks.check(gpus)


@pytest.mark.parametrize("name", ["Adafactor", "Adagrad", "ASGD", "NAdam", "RMSprop", "Rprop"])
@on_many_gpus
def test_other_optimizers(tmp_path: Path, gpus: int, name: str) -> None:
    looks = Looks()
    build = built(lambda parameters: getattr(torch.optim, name)(parameters, lr=0.01))

    pipelined = piped(tmp_path, gpus, build=build, callbacks=[looks])

    torch.testing.assert_close(
        weights(pipelined), weights(plain(tmp_path, build)), rtol=1e-6, atol=1e-9
    )
    looks.check(gpus)


@pytest.mark.parametrize("where", ["cpu", "cuda:0"])
@pytest.mark.parametrize("options", [{"capturable": True}, {"foreach": False}, {"fused": True}])
@on_many_gpus
def test_learning_rate_that_is_a_tensor(
    tmp_path: Path, gpus: int, where: str, options: dict[str, Any]
) -> None:
    class Scheduled(Deep):
        def configure_optimizers(self) -> Any:
            rate = torch.tensor(0.01, device=where)
            optimizer = torch.optim.Adam(self.parameters(), lr=rate, **options)
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

    pipelined = piped(tmp_path, gpus, build=Scheduled)

    torch.testing.assert_close(
        weights(pipelined), weights(plain(tmp_path, Scheduled)), rtol=1e-6, atol=1e-9
    )


@on_many_gpus
def test_lbfgs_is_refused(tmp_path: Path, gpus: int) -> None:
    with pytest.raises(ValueError, match=r"LBFGS updates.*got cuda:0, cuda:1.*such as Adam"):
        piped(tmp_path, gpus, build=built(torch.optim.LBFGS))


@on_many_gpus
def test_lbfgs_of_one_stage(tmp_path: Path, gpus: int) -> None:
    class Headed(Deep):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.LBFGS(self.head.parameters(), lr=0.1, max_iter=3)

    assert_same_weights(piped(tmp_path, gpus, build=Headed), plain(tmp_path, Headed))


# Clipping.


class ClipsItself(Deep):
    options: dict[str, Any]

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.log_dict(grad_norm(self, norm_type=2))
        norm = torch.nn.utils.clip_grad_norm_(self.parameters(), 0.05, **self.options)
        self.log("norm", norm)


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_clip_val": 0.05},
        {"gradient_clip_val": 0.005, "gradient_clip_algorithm": "value"},
        {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2},
    ],
    ids=str,
)
@on_two_and_many_gpus
def test_clipping_by_the_trainer(tmp_path: Path, gpus: int, options: dict[str, Any]) -> None:
    pipelined, alone = piped(tmp_path, gpus, **options), plain(tmp_path, **options)

    assert_same_weights(pipelined, alone)
    torch.testing.assert_close(pipelined.callback_metrics, alone.callback_metrics)


@pytest.mark.parametrize(
    "options",
    [{}, {"foreach": True}, {"foreach": False}, {"norm_type": float("inf")}],
    ids=str,
)
@on_many_gpus
def test_clipping_by_the_module(tmp_path: Path, gpus: int, options: dict[str, Any]) -> None:
    build = type("Clips", (ClipsItself,), {"options": options})

    pipelined, alone = piped(tmp_path, gpus, build=build), plain(tmp_path, build)

    assert_same_weights(pipelined, alone)
    torch.testing.assert_close(pipelined.callback_metrics, alone.callback_metrics)


# Mixed precision.


class Single(Deep):
    """In float32, with a gradient of one stage that overflows in one step if wanted."""

    overflow: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.float()

    def on_after_backward(self) -> None:
        if self.overflow is not None and self.trainer.global_step == 1:
            gradient = self.layers[self.overflow].weight.grad
            assert isinstance(gradient, Tensor)
            gradient.fill_(float("inf"))


@pytest.mark.parametrize("overflow", [None, 0, 2, 6])  # Linear layers, of several stages
@on_many_gpus
def test_gradient_scaling(tmp_path: Path, gpus: int, overflow: int | None) -> None:
    build = type("Overflows", (Single,), {"overflow": overflow})
    options: dict[str, Any] = {"precision": "16-mixed", "gradient_clip_val": 1.0}

    pipelined, alone = (
        piped(tmp_path, gpus, build=build, **options),
        plain(tmp_path, build, **options),
    )

    assert all(value.isfinite().all() for value in weights(pipelined).values())
    torch.testing.assert_close(weights(pipelined), weights(alone), rtol=2e-2, atol=5e-3)
    scalers = [made.precision_plugin.state_dict() for made in (pipelined, alone)]
    assert scalers[0] == scalers[1]
    assert (scalers[0]["scale"] < 65536) is (overflow is not None), "which steps were skipped"


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-true", "bf16-true", "64-true"])
@on_many_gpus
def test_precision(tmp_path: Path, gpus: int, precision: Any) -> None:
    pipelined = piped(tmp_path, gpus, build=Single, precision=precision)

    alone = plain(tmp_path, Single, precision=precision)
    torch.testing.assert_close(weights(pipelined), weights(alone), rtol=5e-2, atol=1e-2)


# Several optimizers.


class Alternates(Single):
    """Two optimizers, each with parameters of every stage, and a step with each in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        return (
            torch.optim.Adam(parameters[::2], lr=0.01),
            torch.optim.SGD(parameters[1::2], lr=0.1, momentum=0.9),
        )

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]  # manual
        x, y = batch
        for optimizer in cast(list[Any], self.optimizers()):
            self.toggle_optimizer(optimizer)
            loss = F.cross_entropy(self(x), y)
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, 0.5, "norm")
            optimizer.step()
            self.untoggle_optimizer(optimizer)


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
@on_many_gpus
def test_manual_optimization_with_two_optimizers(tmp_path: Path, gpus: int, precision: Any) -> None:
    pipelined = piped(tmp_path, gpus, build=Alternates, precision=precision)

    alone = plain(tmp_path, Alternates, precision=precision)
    torch.testing.assert_close(weights(pipelined), weights(alone), rtol=2e-2, atol=5e-3)


# Callbacks that change what is optimized.


class Thaws(BaseFinetuning):
    """Trains the layers from the second epoch on."""

    def freeze_before_training(self, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, Classifier)
        self.freeze(pl_module.layers)

    def finetune_function(
        self, pl_module: L.LightningModule, epoch: int, optimizer: torch.optim.Optimizer
    ) -> None:
        assert isinstance(pl_module, Classifier)
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.layers, optimizer)


def of_trained(parameters: Any) -> torch.optim.Optimizer:
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return torch.optim.SGD(trained, lr=0.1, momentum=0.9)


@on_many_gpus
def test_finetuning(tmp_path: Path, gpus: int) -> None:
    build = built(of_trained)
    thaws = Thaws()

    pipelined = piped(tmp_path, gpus, build=build, callbacks=[thaws], max_epochs=4)

    assert_same_weights(pipelined, plain(tmp_path, build, callbacks=[Thaws()], max_epochs=4))
    assert "finetune_function" not in vars(thaws)


@on_many_gpus
def test_pruning_of_each_layer(tmp_path: Path, gpus: int) -> None:
    def pruning() -> ModelPruning:
        return ModelPruning("l1_unstructured", amount=0.3, use_global_unstructured=False)

    pipelined = piped(tmp_path, gpus, callbacks=[pruning()])

    assert_same_weights(pipelined, plain(tmp_path, callbacks=[pruning()]))


@on_many_gpus
def test_pruning_of_all_layers_together_is_refused(tmp_path: Path, gpus: int) -> None:
    with pytest.raises(ValueError, match=r"ModelPruning\(use_global_unstructured=True\) ranks"):
        piped(tmp_path, gpus, callbacks=[ModelPruning("l1_unstructured", amount=0.3)])
