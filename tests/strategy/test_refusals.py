"""Nothing silent: the refusals of GPipeStrategy at setup, with what to do instead."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe import GPipe, GPipeStrategy
from lightning_gpipe.strategy.refusals import warn_of_one_device
from tests.support.lightning_modules import (
    CLASSES,
    FEATURES,
    WIDTH,
    Classifier,
    Data,
    assert_same_weights,
    fitted,
    six_layers,
    trainer,
)


def test_several_machines(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"one machine.*got Trainer\(num_nodes=2\)"):
        trainer(tmp_path, GPipeStrategy(), num_nodes=2)


TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "0",
}
SLURM = {"SLURM_JOB_NAME": "train", "SLURM_NODEID": "0", "SLURM_PROCID": "1", "SLURM_LOCALID": "1"}


@pytest.mark.parametrize(
    "environment, name",
    [
        (TORCHRUN | {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}, "TorchElastic"),
        (SLURM | {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2"}, "SLURM"),
    ],
    ids=["torchrun", "slurm"],
)
def test_several_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], name: str
) -> None:
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    made = trainer(tmp_path, GPipeStrategy([3, 3]), devices=2)

    with pytest.raises(RuntimeError, match=f"one process: {name}Environment started 2"):
        made.fit(Classifier(), datamodule=Data())


def test_one_process_under_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in (TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}).items():
        monkeypatch.setenv(variable, value)

    made = fitted(tmp_path, GPipeStrategy([3, 3]), devices=2, max_steps=1)

    assert made.global_step == 1


def test_sync_batchnorm(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Trainer\(sync_batchnorm=True\).*Leave it out"):
        fitted(tmp_path, GPipeStrategy([3, 3]), devices=2, sync_batchnorm=True)


def test_too_few_devices(tmp_path: Path) -> None:
    with pytest.raises(ValueError) as error:
        fitted(tmp_path, GPipeStrategy([1, 1, 2, 2]), devices=3)

    assert str(error.value) == (
        "the number of stages must be a multiple of the number of devices, so that each device "
        "has equally many: got 4 stages for 3 devices. Write Trainer(devices=4). devices='auto' "
        "means one device on the CPU and in a notebook, and all GPUs elsewhere."
    )


def test_all_stages_on_one_device_warn(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="All 4 stages.*share one device.*Write Trainer.devices=4"):
        fitted(tmp_path, GPipeStrategy([1, 1, 2, 2]), devices="auto", max_steps=1)


@pytest.mark.parametrize(
    "strategy, devices",
    [("gpipe", "auto"), (GPipeStrategy, "auto"), (GPipeStrategy, 1)],
    ids=["name", "auto", "one"],
)
def test_one_device_without_a_balance_warns(tmp_path: Path, strategy: Any, devices: Any) -> None:
    """Without ``devices=`` all layers were one stage on one CPU, and nothing said so."""
    made = strategy if isinstance(strategy, str) else strategy()

    with pytest.warns(UserWarning, match="one device") as caught:
        fitted(tmp_path, made, devices=devices, max_steps=1)

    messages = [str(warning.message) for warning in caught]
    assert [message for message in messages if "pipelined" in message] == [
        "A pipeline with one device has one stage, so nothing is pipelined. Give it several "
        "devices, such as Trainer(accelerator='gpu', devices=4), or devices=2 on the CPU; or write "
        "balance=[6], if one stage is meant. devices='auto' means one device on the CPU and in a "
        "notebook, and all GPUs elsewhere."
    ]


def test_one_device_for_several_modules_warns() -> None:
    with pytest.warns(UserWarning, match=r"nothing is pipelined.*balance=\[\[2\], \[1\]\]"):
        warn_of_one_device(["parameters", "parameters"], [[2], [1]], devices=1)


@pytest.mark.parametrize("option", ["balance", "chunks"])
def test_one_device_and_a_measurement_warn_once(tmp_path: Path, option: str) -> None:
    given: Any = {"balance": {"balance": "time"}, "chunks": {"chunks": "auto"}}[option]

    with pytest.warns(UserWarning, match="one device") as caught:
        fitted(tmp_path, GPipeStrategy(**given), max_steps=1)

    assert sum("one device" in str(warning.message) for warning in caught) == 1


def test_one_stage_that_was_asked_for_does_not_warn(tmp_path: Path) -> None:
    made = fitted(tmp_path, GPipeStrategy([6]), max_steps=1)  # a warning is an error

    assert made.global_step == 1


class Holder(Classifier):
    """Layers under a path of two names, and others beside them."""

    def __init__(self, *others: nn.Module) -> None:
        super().__init__(layers=nn.Sequential())
        del self.layers
        self.net = nn.ModuleDict({"layers": six_layers()})
        self.others = nn.ModuleList(others)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.net["layers"](x))


class Flat(Classifier):
    """No nn.Sequential at all."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Linear(6, 8)  # type: ignore[assignment]  # the fault under test


@pytest.mark.parametrize(
    "build, arguments, error, messages",
    [
        (Flat, {}, ValueError, ["Flat must hold layers to pipeline", "got no nn.Sequential"]),
        (
            lambda: Holder(six_layers()),
            {"balance": [3, 3]},
            ValueError,
            [
                "got 3 in Holder",
                "module='net.layers': Sequential of 6, 200 parameters",
                "module='others.0': Sequential of 6, 200 parameters",
            ],
        ),
        (
            Holder,
            {"module": "net.body"},
            ValueError,
            ["path of a module in Holder: got 'net.body'", "It holds 'net.layers'."],
        ),
        (
            Holder,
            {"module": "head"},
            TypeError,
            ["Holder.head must call modules in its forward", "got none"],
        ),
        (
            Holder,
            {"balance": [3, 4]},
            ValueError,
            ["got balance=[3, 4] (sum 7) for the 6 layers of Holder.net.layers"],
        ),
        (
            Classifier,
            {"balance": [1] * 7},
            ValueError,
            ["got 7 stages for the 6 layers of Classifier.layers"],
        ),
        (
            lambda: Classifier(layers=nn.Sequential(*[nn.Linear(6, 8), tanh := nn.Tanh(), tanh])),
            {"balance": [1, 2]},
            ValueError,
            ["Tanh at 1 and 2"],
        ),
    ],
    ids=["none", "two", "no-such-path", "one-layer", "wrong-sum", "more-stages", "twice"],
)
def test_module_that_cannot_be_pipelined(
    tmp_path: Path,
    build: Callable[[], L.LightningModule],
    arguments: dict[str, Any],
    error: type[Exception],
    messages: list[str],
) -> None:
    devices = len(arguments.get("balance", "ab"))

    with pytest.raises(error) as raised:
        fitted(tmp_path, GPipeStrategy(**arguments), build=build, devices=devices)

    for message in messages:
        assert message in str(raised.value)


def test_more_devices_than_layers(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="7 stages for the 6 layers of Classifier.layers"):
        fitted(tmp_path, GPipeStrategy(), devices=7)


def test_named_module_among_several(tmp_path: Path) -> None:
    class Looks(L.Callback):
        def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
            pipelined.extend(
                "forward" in each.__dict__ for each in (pl_module.net["layers"], other)
            )

    pipelined: list[bool] = []
    other = six_layers()
    strategy = GPipeStrategy([3, 3], module="net.layers")

    fitted(
        tmp_path, strategy, build=lambda: Holder(other), devices=2, max_steps=1, callbacks=[Looks()]
    )

    assert pipelined == [True, False]


def test_layer_that_the_module_moves_away(tmp_path: Path) -> None:
    class Mover(Classifier):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.layers[4].to("meta")

    message = r"stage 1 \(layers 3..5, cpu\) must stay on cpu: found 'weight' of Linear on meta"
    with pytest.raises(RuntimeError, match=message):
        fitted(tmp_path, GPipeStrategy([3, 3]), build=Mover, devices=2)


@pytest.mark.parametrize("chunks, said", [(4, False), (40, True)])
def test_batch_with_fewer_rows_than_chunks_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, chunks: int, said: bool
) -> None:
    with caplog.at_level(logging.INFO):
        fitted(tmp_path, GPipeStrategy([2, 4], chunks), devices=2, max_epochs=2)

    assert caplog.text.count(f"fewer than chunks={chunks}, so the bubble is larger") == said


class Piped(Classifier):
    """Has made its own pipeline."""

    def __init__(self) -> None:
        made: Any = GPipe(six_layers(), [3, 3], devices=["cpu"] * 2)
        super().__init__(layers=made)


@pytest.mark.parametrize("module", [None, "layers"])
def test_pipeline_in_the_model(tmp_path: Path, module: str | None) -> None:
    """Once it was said to hold no nn.Sequential."""
    strategy = GPipeStrategy([3, 3], module=module)

    with pytest.raises(TypeError, match="got a GPipe as layers of Piped. Write self.layers = nn."):
        fitted(tmp_path, strategy, build=Piped, devices=2)


def test_pipeline_beside_its_layers(tmp_path: Path) -> None:
    def build() -> Classifier:
        model = Classifier()
        model.pipeline = GPipe(model.layers, [3, 3], devices=["cpu"] * 2)
        return model

    with pytest.raises(TypeError, match="got a GPipe as pipeline of Classifier."):
        fitted(tmp_path, GPipeStrategy([3, 3]), build=build, devices=2)


def test_loss_among_the_layers(tmp_path: Path) -> None:
    def build() -> Classifier:
        return Classifier(layers=nn.Sequential(*six_layers(), nn.CrossEntropyLoss()))

    with pytest.raises(TypeError, match="got CrossEntropyLoss at 6. Leave a loss out"):
        fitted(tmp_path, GPipeStrategy([3, 4]), build=build, devices=2)


class Lazy(Classifier):
    """Learns the number of features from its first batch."""

    def __init__(self, *, head: bool = False, dry: bool = False) -> None:
        layers = six_layers()
        if not head:
            layers[0] = nn.LazyLinear(WIDTH)
        super().__init__(layers=layers)
        if head:
            self.head = nn.LazyLinear(CLASSES).double()
        if dry:
            self(torch.zeros(2, FEATURES, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))


lazy = pytest.mark.filterwarnings("ignore:Lazy modules are a new")  # torch, nn/modules/lazy.py


@lazy
@pytest.mark.parametrize("module", [None, "layers"])
@pytest.mark.parametrize("head, name", [(False, "layers.0"), (True, "head")])
def test_lazy_layers(tmp_path: Path, module: str | None, head: bool, name: str) -> None:
    """Once an error of PyTorch's said that ``numel`` cannot be called."""
    strategy = GPipeStrategy([3, 3], module=module)

    with pytest.raises(ValueError, match=rf"parameters of Lazy must be.*ones in {name}. Call the"):
        fitted(tmp_path, strategy, build=partial(Lazy, head=head), devices=2)


@lazy
@pytest.mark.parametrize("balance", [[2, 4], "time"])
@pytest.mark.parametrize("head", [False, True])
def test_layers_that_were_lazy(tmp_path: Path, head: bool, balance: Any) -> None:
    build = partial(Lazy, head=head, dry=True)
    path = tmp_path / "end.ckpt"

    made = fitted(tmp_path, GPipeStrategy(balance), build=build, devices=2)

    assert_same_weights(made, fitted(tmp_path, build=build))
    made.save_checkpoint(path)
    again = fitted(tmp_path, GPipeStrategy([3, 3]), build=build, devices=2, ckpt_path=path)
    assert_same_weights(again, made)
