"""Plain checkpoints: each process writes its part of a folder, and reads what it needs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO
from lightning.pytorch.utilities.consolidate_checkpoint import _format_checkpoint
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from lightning_gpipe import GPipeStrategy
from lightning_gpipe.checkpoints import sharded
from tests.lightning.test_processes import assert_equal
from tests.support.lightning_modules import Classifier, Data, six_layers, trainer
from tests.support.ranks import Pool
from tests.support.trainers import trainer_over

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


class Counting(nn.Tanh):
    """Keeps something that is no tensor: how often it ran, by the size of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, int] = {}

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return super().forward(x)
        self._seen[len(x)] = self._seen.get(len(x), 0) + 1
        return super().forward(x)

    def get_extra_state(self) -> dict[int, int]:
        return dict(self._seen)

    def set_extra_state(self, state: dict[int, int]) -> None:
        self._seen = dict(state)


class Counted(Classifier):
    """Layers that count in both stages, and an optimizer that was asked for."""

    def __init__(self, optimizer: str = "adam") -> None:
        layers = six_layers()
        layers[1], layers[5] = Counting(), Counting()
        super().__init__(optimizer, layers=layers)

    def configure_optimizers(self) -> Any:
        if self.hparams["optimizer"] == "sgd":
            return torch.optim.SGD(self.parameters(), lr=0.1)
        return super().configure_optimizers()


def fit(
    root: Path,
    processes: str,
    path: Path | None,
    epochs: int,
    *,
    optimizer: str = "adam",
    balance: Any = (2, 4),
    in_parts: bool = True,
    machines: Any = None,
    **strategy: Any,
) -> Path:
    """A fit that may go on from a checkpoint; returns its own."""
    torch.manual_seed(0)
    model = Counted(optimizer)
    options = {"activation_checkpointing": "never", "save_distributed_checkpoint": in_parts}
    made = trainer_over(
        root, processes, list(balance), options | strategy, machines, max_epochs=epochs
    )
    made.fit(model, datamodule=Data(), ckpt_path=path)
    made.save_checkpoint(root / f"{epochs}.ckpt")
    return root / f"{epochs}.ckpt"


class Store(DirFileSystem):
    """Files of this machine as those of a remote store, which copies instead of moving."""

    protocol = "store"

    def __init__(self, **options: Any) -> None:
        super().__init__(path="/", fs=LocalFileSystem(), **options)


fsspec.register_implementation("store", Store, clobber=True)


def stored(root: Path, processes: str, path: str | None, epochs: int) -> str:
    """A fit whose checkpoint is in a store: one that is written twice, the second time anew."""
    torch.manual_seed(0)
    options = {"activation_checkpointing": "never", "save_distributed_checkpoint": True}
    made = trainer_over(root, processes, [2, 4], options, max_epochs=epochs)
    made.fit(Counted(), datamodule=Data(), ckpt_path=path)
    for _ in range(2):
        made.save_checkpoint(f"store://{root}/{epochs}.ckpt")
    return f"store://{root}/{epochs}.ckpt"


def plain(root: Path, path: Path, optimizer: str = "adam") -> dict[str, Any]:
    """The state dict after a second epoch of a Trainer without a pipeline."""
    with torch.random.fork_rng(devices=[]):
        model = Counted(optimizer)
    trainer(root, max_epochs=2).fit(model, datamodule=Data(), ckpt_path=path)
    return tensors(dict(sorted(model.state_dict().items())))


def tensors(state: dict[str, Any]) -> dict[str, Tensor]:
    """Those of a state dict; layers count the batches of a pipeline by their micro-batches."""
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def consolidated(folder: Path) -> dict[str, Any]:
    """As Lightning's command makes one file of a folder."""
    return _format_checkpoint(_load_distributed_checkpoint(folder))


def values(checkpoint: Path) -> dict[str, Any]:
    """The state dict in a file, or in a folder."""
    whole = consolidated(checkpoint) if checkpoint.is_dir() else torch.load(checkpoint)
    return dict(sorted(whole["state_dict"].items()))


def alone(root: Path, *args: Any, **options: Any) -> Path:
    """A fit in this process, which leaves the random numbers alone."""
    with torch.random.fork_rng(devices=[]):
        return fit(root, "single", *args, **options)


def test_parts_of_two_processes_load_anywhere(tmp_path: Path, two_ranks: Pool) -> None:
    one = alone(tmp_path / "one", None, 1, in_parts=False)
    two = values(alone(tmp_path / "one", one, 2, in_parts=False))

    parts, _ = two_ranks.run(fit, tmp_path / "both", "per_stage", None, 1)
    assert parts.is_dir() and not list(parts.parent.glob("*.part"))
    assert_equal(values(parts), values(one))

    other_balance = alone(tmp_path / "again", parts, 2, balance=[4, 2])
    assert_equal(values(other_balance), two)
    both_again, _ = two_ranks.run(fit, tmp_path / "both", "per_stage", parts, 2)
    assert_equal(values(both_again), two)
    gathered = partial(fit, in_parts=False)
    in_a_file, _ = two_ranks.run(gathered, tmp_path / "file", "per_stage", parts, 2)
    assert_equal(values(in_a_file), two)

    file = tmp_path / "consolidated.ckpt"
    torch.save(consolidated(parts), file)
    torch.testing.assert_close(plain(tmp_path, file), tensors(two), rtol=1e-9, atol=1e-11)


def test_parts_of_one_process_load_in_two(tmp_path: Path, two_ranks: Pool) -> None:
    one = alone(tmp_path / "one", None, 1)
    two = alone(tmp_path / "one", one, 2)

    found, _ = two_ranks.run(fit, tmp_path / "both", "per_stage", one, 2)

    assert_equal(values(found), values(two))


def test_parts_in_a_remote_store(tmp_path: Path, two_ranks: Pool) -> None:
    two = values(alone(tmp_path / "one", alone(tmp_path / "one", None, 1), 2))
    store = tmp_path / "store"

    path, _ = two_ranks.run(stored, store, "per_stage", None, 1)
    again, _ = two_ranks.run(stored, store, "per_stage", path, 2)
    with torch.random.fork_rng(devices=[]):
        here = stored(tmp_path / "other", "single", path, 2)

    assert path == f"store://{store}/1.ckpt"
    assert sorted(each.name for each in store.iterdir()) == ["1.ckpt", "2.ckpt"]
    for place in (again, here):
        assert_equal(values(Path(place.removeprefix("store://"))), two)


def test_save_to_a_store_that_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = stored(tmp_path, "single", None, 1)
    before = values(tmp_path / "1.ckpt")

    monkeypatch.setattr(sharded, "save", interrupt)
    with pytest.raises(KeyboardInterrupt):
        stored(tmp_path, "single", path, 1)
    monkeypatch.undo()

    assert_equal(values(tmp_path / "1.ckpt"), before)
    stored(tmp_path, "single", path, 1)
    assert [each.name for each in tmp_path.iterdir()] == ["1.ckpt"]


def test_first_of_two_replicas_saves(tmp_path: Path, two_ranks: Pool) -> None:
    run = partial(fit, machines=(4, 1), replicas=2)
    parts, _ = two_ranks.run(run, tmp_path / "both", "single", None, 1)

    again, _ = two_ranks.run(run, tmp_path / "both", "single", parts, 2)

    assert set(values(again)) == set(Counted().state_dict())


@pytest.mark.parametrize("optimizer", ["momentum", "sgd"])
def test_consolidated_file_in_a_plain_trainer(tmp_path: Path, optimizer: str) -> None:
    one = alone(tmp_path, None, 1, optimizer=optimizer)
    two = alone(tmp_path, one, 2, optimizer=optimizer)
    file = tmp_path / "consolidated.ckpt"
    torch.save(consolidated(one), file)

    found = plain(tmp_path, file, optimizer)

    torch.testing.assert_close(found, tensors(values(two)), rtol=1e-9, atol=1e-11)


def test_save_that_is_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = trainer_over(
        tmp_path, "single", [2, 4], {"save_distributed_checkpoint": True}, max_epochs=1
    )
    made.fit(Counted(), datamodule=Data())
    path = tmp_path / "last.ckpt"
    made.save_checkpoint(path)
    before = values(path)

    monkeypatch.setattr(sharded, "save", interrupt)
    with pytest.raises(KeyboardInterrupt):
        made.save_checkpoint(path)
    monkeypatch.undo()

    assert_equal(values(path), before)
    path.rename(tmp_path / "last.ckpt.old")  # as it is between the last two steps of a save
    made.validate(Counted(), datamodule=Data(), ckpt_path=path, verbose=False)
    made.save_checkpoint(path)
    assert [each.name for each in tmp_path.glob("last*")] == ["last.ckpt"]


def interrupt(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


def test_part_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = trainer_over(
        tmp_path, "single", [2, 4], {"save_distributed_checkpoint": True}, max_epochs=1
    )
    made.fit(Counted(), datamodule=Data())

    def full(*_: Any, **__: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(FileSystemWriter, "write_data", full)
    with pytest.raises(RuntimeError, match=r"(?s)a part of .*end.ckpt was not written.*no space"):
        made.save_checkpoint(tmp_path / "end.ckpt")


def test_other_names(tmp_path: Path) -> None:
    parts = alone(tmp_path, None, 1)

    class Wider(Counted):
        def __init__(self) -> None:
            super().__init__()
            self.tail = self.head
            del self.head

    strategy = GPipeStrategy([2, 4])
    with pytest.raises(RuntimeError, match=r"lacks .*tail.weight.*, and has .*head.bias"):
        trainer(tmp_path, strategy, devices=2).validate(Wider(), Data(), ckpt_path=parts)


def test_best_checkpoints_are_kept_and_others_removed(tmp_path: Path) -> None:
    strategy = GPipeStrategy([2, 4], save_distributed_checkpoint=True)
    best = ModelCheckpoint(tmp_path, "{epoch}", monitor="train_loss", save_last=True)
    made = trainer(
        tmp_path, strategy, devices=2, callbacks=[best], enable_checkpointing=True, max_epochs=3
    )
    made.fit(Counted(), datamodule=Data())

    made.test(ckpt_path="best", datamodule=Data(), verbose=False)

    assert sorted(each.name for each in tmp_path.glob("*.ckpt")) == ["epoch=2.ckpt", "last.ckpt"]


def test_io_that_is_not_used(tmp_path: Path) -> None:
    strategy = GPipeStrategy([2, 4], save_distributed_checkpoint=True)
    made = trainer(tmp_path, strategy, devices=2, plugins=[AsyncCheckpointIO()])

    with pytest.raises(ValueError, match="got AsyncCheckpointIO"):
        made.fit(Counted(), datamodule=Data())
