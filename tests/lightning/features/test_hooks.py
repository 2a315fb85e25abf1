"""Each hook of modules, data modules and callbacks is called when, and with what, it is plain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lightning_gpipe import GPipeStrategy
from tests.lightning.features import found
from tests.lightning.features.run import recording
from tests.support.lightning_modules import (
    Classifier,
    Data,
    assert_same_weights,
    rows,
    trainer,
)

Calls = dict[str, list[Any]]

# Lightning refuses it beside configure_model, which has taken its place.
DEPRECATED = frozenset({"configure_sharded_model"})
KINDS = [found.HOOKS, found.DATA, found.CALLBACK]
NAMES = [(kind, name) for kind in KINDS for name in sorted(found.features()[kind] - DEPRECATED)]
NOT_CALLED = {
    (found.CALLBACK, "state_key"): "a property",
    (found.DATA, "name"): "an attribute",
    (found.DATA, "from_datasets"): "a way to make one",
    (found.DATA, "load_from_checkpoint"): "a way to make one",
}


class Fails(Callback):
    """Raises in the second training batch."""

    def on_train_batch_start(self, trainer: L.Trainer, *rest: Any) -> None:
        if rest[-1] == 1:
            raise ArithmeticError


class Loads(Classifier):
    """Has its data, too."""

    train_dataloader = Data.train_dataloader
    val_dataloader = test_dataloader = predict_dataloader = Data.val_dataloader
    shuffle = False


class Remembers(Data):
    """Has a state of its own in checkpoints."""

    def state_dict(self) -> dict[str, Any]:
        return {"kept": 1}


class Keeps(Callback):
    """Has a state of its own in checkpoints."""

    def state_dict(self) -> dict[str, Any]:
        return {"kept": 1}


def calls_of_all_hooks(root: Path, *, piped: bool) -> Calls:
    """The calls of the hooks of each kind, with the data in the module and in one of their own."""
    calls: Calls = {kind: [] for kind in KINDS}
    module = recording(Loads, calls[found.HOOKS], but=DEPRECATED)
    callback = recording(Keeps, calls[found.CALLBACK])
    run_all(root / "own", module, lambda: None, callback, piped=piped)
    data = recording(Remembers, calls[found.DATA])
    run_all(root / "data", Classifier, data, Callback, piped=piped)
    return calls


def run_all(root: Path, module: Any, data: Any, callback: Any, *, piped: bool) -> None:
    """Run each method of a Trainer, a fit that is resumed, and one that fails."""

    def made(*callbacks: Callback, **options: Any) -> L.Trainer:
        if piped:
            options |= {"strategy": GPipeStrategy([2, 4], chunks=3), "devices": 2}
        return trainer(root, callbacks=[callback(), *callbacks], max_epochs=2, **options)

    torch.manual_seed(0)
    model = module()
    first = made(ModelCheckpoint(root, "{epoch}", save_top_k=-1), enable_checkpointing=True)
    first.fit(model, datamodule=data())
    for method in ("validate", "test", "predict"):
        getattr(made(), method)(model, datamodule=data())
    made().fit(module(), datamodule=data(), ckpt_path=root / "epoch=0.ckpt")
    with pytest.raises(ArithmeticError):
        made(Fails()).fit(module(), datamodule=data())


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Calls:
    return calls_of_all_hooks(tmp_path_factory.mktemp("plain"), piped=False)


@pytest.fixture(scope="module")
def piped(tmp_path_factory: pytest.TempPathFactory) -> Calls:
    return calls_of_all_hooks(tmp_path_factory.mktemp("piped"), piped=True)


@pytest.mark.parametrize("kind", KINDS)
def test_order_of_all_calls(plain: Calls, piped: Calls, kind: str) -> None:
    assert piped[kind] == plain[kind]


@pytest.mark.parametrize("kind, name", [each for each in NAMES if each not in NOT_CALLED])
def test_hook(plain: Calls, piped: Calls, kind: str, name: str) -> None:
    expected, seen = ([call for call in of[kind] if call[0] == name] for of in (plain, piped))

    assert expected, "the runs of this file do not call it"
    assert seen == expected


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set")  # by default, on the CPU, too
def test_data_module_of_datasets(tmp_path: Path) -> None:
    def run(**options: Any) -> L.Trainer:
        data = L.LightningDataModule.from_datasets(rows(20, 1), rows(9, 2), batch_size=7)
        data.name = "twenty rows"
        torch.manual_seed(0)
        made = trainer(tmp_path, max_epochs=1, **options)
        made.fit(Classifier(), datamodule=data)
        return made

    assert_same_weights(run(strategy=GPipeStrategy([2, 4], 3), devices=2), run())


class Kept(Data):
    """Is in checkpoints with its argument."""

    def __init__(self, shuffle: bool) -> None:
        super().__init__(shuffle)
        self.save_hyperparameters()


def test_data_module_of_a_checkpoint(tmp_path: Path) -> None:
    made = trainer(tmp_path, GPipeStrategy([2, 4], chunks=3), devices=2, max_epochs=1)
    made.fit(Classifier(), datamodule=Kept(shuffle=True))
    made.save_checkpoint(tmp_path / "end.ckpt")

    assert Kept.load_from_checkpoint(tmp_path / "end.ckpt").shuffle


def test_hook_that_lightning_has_given_up(tmp_path: Path) -> None:
    class Sharded(Classifier):
        def configure_sharded_model(self) -> None: ...

        def configure_model(self) -> None: ...

    made = trainer(tmp_path, GPipeStrategy([2, 4]), devices=2)

    with pytest.raises(RuntimeError, match="configure_model"):
        made.fit(Sharded(), datamodule=Data())
