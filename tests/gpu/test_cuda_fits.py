"""Fits in a pipeline over two to four GPUs, compared with those on one."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.tuner.tuning import Tuner
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_gpipe import GPipeStrategy
from tests.gpu.trainers import (
    MANY,
    Build,
    Deep,
    needs,
    on_many_gpus,
    on_two_and_many_gpus,
    piped,
    places,
    plain,
)
from tests.support.faults import Fuse, throw
from tests.support.lightning_modules import (
    CLASSES,
    WIDTH,
    Data,
    assert_same_weights,
    fitted,
    rows,
    trainer,
)
from tests.support.process import workers
from tests.support.skip_layers import pair


def compare(root: Path, gpus: int, build: Build = Deep, **options: Any) -> None:
    """Weights and metrics after a fit are those of a fit on one GPU."""
    pipelined, alone = piped(root, gpus, build=build, **options), plain(root, build, **options)

    assert_same_weights(pipelined, alone)
    torch.testing.assert_close(pipelined.callback_metrics, alone.callback_metrics)


# Which devices, which stages.


class Places(L.Callback):
    """Notes where the model is."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.model = places(pl_module)
        self.root = pl_module.device


@pytest.mark.parametrize("order", [[1, 0], pytest.param([3, 1], marks=needs(4))], ids=str)
@pytest.mark.parametrize("gpus", [pytest.param(2, marks=needs(2), id="2-gpus")])
def test_devices_in_the_order_that_the_user_wrote(
    tmp_path: Path, gpus: int, order: list[int]
) -> None:
    seen = Places()

    pipelined = piped(tmp_path, order, callbacks=[seen])

    first, last = (torch.device("cuda", k) for k in order)
    assert seen.model["layers.0.weight"] == first
    assert seen.model["layers.6.weight"] == seen.model["head.weight"] == seen.root == last
    assert_same_weights(pipelined, plain(tmp_path))


@pytest.mark.parametrize("mode", ["always", "except_last", "never"])
@pytest.mark.parametrize(
    "balance, devices",
    [
        pytest.param([2, 2, 2, 2], 2, marks=needs(2)),
        pytest.param([1] * 8, 2, marks=needs(2)),
        pytest.param([2, 1, 1, 1, 1, 2], 3, marks=needs(3)),
        pytest.param([1] * 8, 4, marks=needs(4)),
    ],
)
def test_more_stages_than_devices(
    tmp_path: Path, balance: list[int], devices: int, mode: Any
) -> None:
    strategy = GPipeStrategy(balance, chunks=3, activation_checkpointing=mode)

    pipelined = fitted(tmp_path, strategy, build=Deep, accelerator="gpu", devices=devices)

    assert_same_weights(pipelined, plain(tmp_path))


@pytest.mark.parametrize("options", [{"threads": False}, {"verify": True}], ids=str)
@on_many_gpus
def test_ways_to_run(tmp_path: Path, gpus: int, options: dict[str, Any]) -> None:
    strategy = GPipeStrategy(chunks=3, **options)

    pipelined = fitted(tmp_path, strategy, build=Deep, accelerator="gpu", devices=gpus)

    assert_same_weights(pipelined, plain(tmp_path))


# Tensors that several stages use.


class Tied(Deep):
    """The first and the last stage share a weight, and others a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[6].weight = self.layers[2].weight
        self.layers[4].bias = self.layers[0].bias


class TiedToTheHead(Deep):
    """A layer of the pipeline shares its weight with one that is not pipelined."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH).double()
        assert isinstance(self.layers[2].weight, nn.Parameter)
        self.head.weight = self.layers[2].weight

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:, :CLASSES]


class Skips(Deep):
    """Two skip connections that cross stages, over one another."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = list(self.layers)
        (one, end_of_one), (other, end_of_other) = pair(), pair()
        self.layers = nn.Sequential(
            layers[0], one, other, *layers[1:6], end_of_one, layers[6], end_of_other, layers[7]
        )


class SkipsAndTied(Skips):
    def __init__(self) -> None:
        super().__init__()
        first, last = self.layers[4], self.layers[9]
        assert isinstance(first, nn.Linear) and isinstance(last, nn.Linear)
        last.weight = first.weight


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}], ids=str)
@pytest.mark.parametrize("build", [Tied, TiedToTheHead, Skips, SkipsAndTied])
@on_many_gpus
def test_shared_weights_and_skips(
    tmp_path: Path, gpus: int, build: Build, options: dict[str, Any]
) -> None:
    compare(tmp_path, gpus, build, **options)


class Penalised(Deep):
    """The loss has all weights, and metrics are on the devices of the stages."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        norms = {f"norm_{k}": each.norm() for k, each in enumerate(self.parameters())}
        self.log_dict(norms, on_step=True, on_epoch=True)
        self.log("largest", next(self.parameters()).abs().max(), on_epoch=True, reduce_fx="max")
        penalty: Any = sum(each.abs().sum().to(self.device) for each in self.parameters())
        return loss + 1e-3 * penalty


class SeveralForwards(Deep):
    """Runs the layers without gradients and twice with them."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        with torch.no_grad():
            target = self(x)
        return F.cross_entropy(self(x), y) + (self(x.flip(1)) - 0.9 * target).square().mean()


class FrozenStages(Deep):
    """The first layers are not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].requires_grad_(False)
        self.layers[2].requires_grad_(False)


class AnotherCurrentDevice(Deep):
    """The step runs while the first GPU but one is the current device."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.cuda.device(min(1, torch.cuda.device_count() - 1)):
            return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("build", [Penalised, SeveralForwards, FrozenStages, AnotherCurrentDevice])
@on_many_gpus
def test_steps(tmp_path: Path, gpus: int, build: Build) -> None:
    compare(tmp_path, gpus, build)


class Normed(Deep):
    """Has a batch norm in every stage."""

    def __init__(self) -> None:
        super().__init__()
        layers = [
            each
            for layer in self.layers
            for each in (
                [layer, nn.BatchNorm1d(WIDTH)] if isinstance(layer, nn.Linear) else [layer]
            )
        ]
        self.layers = nn.Sequential(*layers).double()


@on_two_and_many_gpus
def test_running_statistics(tmp_path: Path, gpus: int) -> None:
    # One chunk, so that a batch norm normalises as on one device.
    pipelined = piped(tmp_path, gpus, 1, build=Normed)

    assert_same_weights(pipelined, plain(tmp_path, Normed))


class Dropping(Deep):
    """Draws random numbers in every stage."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(each for layer in self.layers for each in (layer, nn.Dropout(0.2)))
        )


@on_two_and_many_gpus
def test_dropout_is_the_same_when_recomputed(tmp_path: Path, gpus: int) -> None:
    def run(mode: Any) -> L.Trainer:
        strategy = GPipeStrategy(chunks=3, activation_checkpointing=mode)
        return fitted(tmp_path, strategy, build=Dropping, accelerator="gpu", devices=gpus)

    assert_same_weights(run("always"), run("never"))


class Copies(L.Callback):
    """Copies the model in the middle of the fit, and runs the copy on one device."""

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if trainer.global_step == 4:
            self.x = rows(5, seed=3).tensors[0]
            self.output = copy.deepcopy(pl_module).to(pl_module.device)(self.x.to(pl_module.device))
            self.weights = {name: each.cpu() for name, each in pl_module.state_dict().items()}


@on_many_gpus
def test_copy_made_during_a_fit(tmp_path: Path, gpus: int) -> None:
    copies = Copies()

    pipelined = piped(tmp_path, gpus, callbacks=[copies])

    assert_same_weights(pipelined, plain(tmp_path))
    reference = Deep()
    reference.load_state_dict(copies.weights)
    torch.testing.assert_close(copies.output, reference(copies.x), check_device=False)


# Evaluation and tuning.


@pytest.mark.parametrize("method", ["validate", "test", "predict"])
@on_two_and_many_gpus
def test_evaluation(tmp_path: Path, gpus: int, method: str) -> None:
    torch.manual_seed(0)
    model = Deep()
    quiet = {} if method == "predict" else {"verbose": False}
    alone = trainer(tmp_path, accelerator="gpu")
    pipelined = trainer(tmp_path, GPipeStrategy(chunks=3), accelerator="gpu", devices=gpus)

    found = getattr(pipelined, method)(model, datamodule=Data(), **quiet)

    expected = getattr(alone, method)(model, datamodule=Data(), **quiet)
    torch.testing.assert_close(found, expected, check_device=False)


class Tunable(Deep):
    """Has the learning rate that the tuner looks for."""

    lr = 0.1

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


class Sized(Data):
    """Has the batch size that the tuner looks for."""

    batch_size = 2

    def train_dataloader(self) -> Any:
        return DataLoader(rows(20, seed=1), batch_size=self.batch_size)


@on_many_gpus
def test_learning_rate_finder(tmp_path: Path, gpus: int) -> None:
    def run(fit: Any, *devices: int) -> list[float]:
        finder = LearningRateFinder(
            num_training_steps=12, early_stop_threshold=None, update_attr=False
        )
        fit(tmp_path, *devices, build=Tunable, max_epochs=9, callbacks=[finder])
        assert finder.optimal_lr is not None
        losses: list[float] = finder.optimal_lr.results["loss"]
        return losses

    assert run(piped, gpus) == pytest.approx(run(plain), rel=1e-6)


@on_many_gpus
def test_batch_size_finder(tmp_path: Path, gpus: int) -> None:
    def run(strategy: Any, devices: int) -> tuple[int | None, L.Trainer]:
        torch.manual_seed(0)
        model = Deep()
        made = trainer(tmp_path, strategy, accelerator="gpu", devices=devices)
        size = Tuner(made).scale_batch_size(
            model, datamodule=Sized(), max_trials=3, steps_per_trial=2, init_val=2
        )
        made.fit(model, datamodule=Data())
        return size, made

    size, pipelined = run(GPipeStrategy(chunks=3), gpus)

    expected, alone = run("auto", 1)
    assert size == expected
    assert_same_weights(pipelined, alone)


# Interrupts.


class Fused(Deep):
    """Has a layer in every stage that can raise, and a step that can."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(each for layer in self.layers for each in (layer, Fuse())),
        )
        self.in_step: BaseException | None = None

    @property
    def fuses(self) -> list[Fuse]:
        return [layer for layer in self.layers if isinstance(layer, Fuse)]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.in_step is not None and batch_idx == 1:
            raise self.in_step
        return loss


def interrupted(root: Path, gpus: int) -> L.Trainer:
    """A Trainer that runs a layer three times in a batch, and not before the first."""
    strategy = GPipeStrategy(chunks=3, activation_checkpointing="never")
    return trainer(root, strategy, accelerator="gpu", devices=gpus, num_sanity_val_steps=0)


@pytest.mark.parametrize("where", ["forward", "backward", "step"])
@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
@on_many_gpus
def test_new_fit_after_one_that_was_interrupted(
    tmp_path: Path, gpus: int, kind: type[BaseException], where: str
) -> None:
    torch.manual_seed(0)
    model = Fused()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    if where == "step":
        model.in_step = kind("stop here")
    else:
        model.fuses[4].light((where, 4), throw(kind("stop here")))  # in the second batch
    # Lightning ends the program after a KeyboardInterrupt, with SystemExit.
    seen = SystemExit if kind is KeyboardInterrupt else kind
    with pytest.raises(seen):
        interrupted(tmp_path, gpus).fit(model, datamodule=Data())
    assert workers() == []
    assert {device.type for device in places(model).values()} == {"cpu"}
    model.in_step = None
    model.load_state_dict(before)

    again = trainer(tmp_path, GPipeStrategy(chunks=3), accelerator="gpu", devices=gpus)
    again.fit(model, datamodule=Data())

    assert_same_weights(again, plain(tmp_path, Fused))


@on_many_gpus
def test_error_names_the_stage_and_its_device(tmp_path: Path, gpus: int) -> None:
    model = Fused()
    model.fuses[-1].light(("forward", 4), throw(ValueError("stop here")))

    with pytest.raises(ValueError, match="stop here") as error:
        interrupted(tmp_path, gpus).fit(model, datamodule=Data())

    (note,) = error.value.__notes__
    assert f"on stage {MANY - 1} (" in note and f"cuda:{MANY - 1})" in note
