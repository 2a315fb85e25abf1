"""A Trainer over several processes ends where one in a single process does, to the bit.

Here are also the tests of ``gathering`` and ``shared_batches``.
"""

from __future__ import annotations

import gc
import os
import random
import re
import sys
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    Callback,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from tests.support.lightning_modules import Classifier, Data, six_layers
from tests.support.ranks import Pool, new_ranks
from tests.support.trainers import trainer_over

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")

BALANCE = {"per_stage": [2, 4], "per_node": [1, 2, 2, 1]}


class History(Callback):
    """What was logged."""

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.seen.append({name: float(x) for name, x in trainer.callback_metrics.items()})

    def on_validation_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.on_train_batch_end(trainer)


def dropping(optimizer: str = "adam") -> Classifier:
    layers = six_layers()
    layers[1] = nn.Sequential(nn.Tanh(), nn.Dropout(0.2))
    return Classifier(optimizer, layers=layers)


def fit(root: Path, processes: str, mode: str, name: str, **options: Any) -> dict[str, Any]:
    """A fit, and what came of it in this process."""
    torch.manual_seed(0)
    model = BUILDS[name]()
    history = History()
    saved = ModelCheckpoint(root, "{epoch}", save_top_k=-1)
    made = trainer_over(
        root,
        processes,
        BALANCE[mode],
        {},
        callbacks=[history, saved],
        enable_checkpointing=True,
        **{"max_epochs": 2, **options},
    )
    data = Data(shuffle=True)
    made.fit(model, datamodule=data)
    made.save_checkpoint(root / "end.ckpt")
    evaluated = [made.validate(model, data), made.test(model, data)]
    return {
        "history": history.seen,
        "evaluated": evaluated,
        "predicted": made.predict(model, data),
        "parameters": {n: p.detach() for n, p in model.named_parameters() if not p.is_meta},
        "step": made.global_step,
        "random": torch.rand(()),
    }


BUILDS: dict[str, Any] = {
    "adam": dropping,
    "momentum": partial(dropping, "momentum"),
}


def leaves(value: Any) -> list[Any]:
    """The keys and values of nested containers."""
    if isinstance(value, dict):
        return [x for key, item in value.items() for x in (key, *leaves(item))]
    if isinstance(value, list | tuple):
        return [x for item in value for x in leaves(item)]
    return [value]


def assert_equal(actual: Any, expected: Any) -> None:
    """Equal to the bit."""
    found, wanted = leaves(actual), leaves(expected)
    assert len(found) == len(wanted)
    for one, two in zip(found, wanted, strict=True):
        if isinstance(two, Tensor):
            torch.testing.assert_close(one, two, rtol=0, atol=0)
        else:
            assert one == two


def checkpoint(path: Path) -> dict[str, Any]:
    """What a checkpoint has, but for its folder, and generators that the tests do not seed."""
    loaded: dict[str, Any] = torch.load(path, weights_only=False)
    del loaded["callbacks"]
    loaded.pop("lightning_gpipe", None)
    return loaded


@pytest.mark.parametrize(
    "mode, name, options",
    [
        ("per_node", "adam", {}),
        ("per_stage", "momentum", {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}),
        ("per_stage", "adam", {"precision": "bf16-mixed"}),
    ],
    ids=["per_node", "clipped-accumulated", "bf16"],
)
def test_fit(
    tmp_path: Path, two_ranks: Pool, mode: str, name: str, options: dict[str, Any]
) -> None:
    with torch.random.fork_rng(devices=[]):
        expected = fit(tmp_path / "single", "single", mode, name, **options)

    found = two_ranks.run(partial(fit, **options), tmp_path / "both", mode, mode, name)

    parameters = expected.pop("parameters")
    everywhere: dict[str, Tensor] = {}
    for each in found:
        own = each.pop("parameters")
        assert_equal(own, {name: parameters[name] for name in own})
        assert_equal(each, expected)
        everywhere |= own
    assert set(everywhere) == set(parameters)
    for file in ("epoch=0.ckpt", "epoch=1.ckpt", "end.ckpt"):
        one, other = (checkpoint(tmp_path / run / file) for run in ("both", "single"))
        assert_equal(one, other)
        assert one["state_dict"]._metadata == other["state_dict"]._metadata


# Checkpoints.


def resumed(root: Path, processes: str, mode: str, path: Path | None, epochs: int) -> Any:
    """A fit that goes on from a checkpoint, and its last checkpoint."""
    torch.manual_seed(0)
    model = dropping()
    made = trainer_over(root, processes, BALANCE[mode], {}, max_epochs=epochs)
    made.fit(model, datamodule=Data(shuffle=True), ckpt_path=path)
    made.save_checkpoint(root / f"{epochs}.ckpt")
    return made.global_step


def test_resumed_in_other_numbers_of_processes(tmp_path: Path, two_ranks: Pool) -> None:
    one, both, again = (tmp_path / name for name in ("one", "both", "again"))
    with torch.random.fork_rng(devices=[]):
        resumed(one, "single", "per_stage", None, 1)
        resumed(one, "single", "per_stage", one / "1.ckpt", 2)
        resumed(one, "single", "per_stage", one / "2.ckpt", 3)

    steps = two_ranks.run(resumed, both, "per_stage", "per_stage", one / "1.ckpt", 2)
    with torch.random.fork_rng(devices=[]):
        resumed(again, "single", "per_stage", both / "2.ckpt", 3)

    assert steps == [6, 6]
    assert_equal(checkpoint(both / "2.ckpt"), checkpoint(one / "2.ckpt"))
    assert_equal(checkpoint(again / "3.ckpt"), checkpoint(one / "3.ckpt"))


TRAINERS: list[L.Trainer] = []  # of processes that do not end with their function


def saved_by_one(root: Path) -> str:
    """What a rank is told that saves alone."""
    made = trainer_over(root, "per_stage", [2, 4], {"timeout": timedelta(seconds=2)}, max_epochs=1)
    made.fit(Classifier(), datamodule=Data())
    TRAINERS.append(made)
    if made.global_rank == 1:
        return ""
    with pytest.raises(RuntimeError) as error:
        made.save_checkpoint(root / "alone.ckpt")
    return str(error.value)


def test_checkpoint_saved_by_one_process_only(tmp_path: Path) -> None:
    with new_ranks(2) as ranks:
        message, _ = ranks.run(saved_by_one, tmp_path)

    assert re.search(
        r"come to save a checkpoint .*within 2 s, the timeout: rank 1 .* did not\.", message
    )


# Data.


class Stream(IterableDataset[Any]):
    """Rows that are drawn, as many as are drawn."""

    def __iter__(self) -> Iterator[Any]:
        for _ in range(int(torch.randint(6, 15, ()))):
            x = torch.rand(6, dtype=torch.float64) * np.random.rand()
            yield {"x": x.t(), "y": int(x.argmax()) % 3, "name": "row"}


class Streaming(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert batch["name"][0] == "row"
        loss: Tensor = super().training_step((batch["x"], batch["y"]), batch_idx)
        return loss + 0.001 * random.random() * np.random.rand()


def fit_stream(root: Path, processes: str, seed: int) -> Any:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    model = Streaming()
    if processes != "single" and dist.get_rank():
        np.random.rand(3)  # of which it draws nothing
    made = trainer_over(root, processes, [2, 4], {})
    made.fit(model, DataLoader(Stream(), batch_size=4))
    return made.global_step, made.callback_metrics, torch.rand(()), np.random.rand()


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no")
@pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`")
def test_random_stream_of_unknown_length(tmp_path: Path, two_ranks: Pool) -> None:
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        expected = fit_stream(tmp_path, "single", 3)
    random.setstate(states[0])
    np.random.set_state(states[1])

    found = two_ranks.run(fit_stream, tmp_path, "per_stage", 3)

    assert_equal(found, [expected, expected])


class Broken(Dataset[Any]):
    """Raises at its fifth row."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, k: int) -> Any:
        if k == 5:
            raise OSError("no such file: row 5")
        return torch.ones(6, dtype=torch.float64), 1


def fit_broken(root: Path) -> str:
    made = trainer_over(root, "per_stage", [2, 4], {})
    with pytest.raises((OSError, RuntimeError)) as error:
        made.fit(Classifier(), DataLoader(Broken(), batch_size=2))
    return f"{type(error.value).__name__}: {error.value}"


def test_dataset_that_raises(tmp_path: Path) -> None:
    with new_ranks(2) as ranks:
        found = ranks.run(fit_broken, tmp_path)

    assert found == [
        "OSError: no such file: row 5",
        "RuntimeError: rank 0, which loads the batches, failed: OSError: no such file: row 5",
    ]


# Models.


class Tied(L.LightningModule):
    """An embedding around the layers, whose weight the last layer has too; built late."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: nn.Sequential | None = None

    def configure_model(self) -> None:
        if self.layers is None:
            self.embedding = nn.Linear(6, 6, bias=False)
            last = nn.Linear(6, 6)
            last.weight = self.embedding.weight
            self.layers = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), last)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert self.layers is not None
        x = self.layers(self.embedding(batch[0].float()))
        return nn.functional.cross_entropy(x, batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 0.01)


def fit_tied(root: Path, processes: str) -> dict[str, Any]:
    torch.manual_seed(5)
    made = trainer_over(root, processes, [2, 2], {})
    with made.init_module(empty_init=True):
        model = Tied()
        model.configure_model()
    made.fit(model, datamodule=Data())
    made.save_checkpoint(root / "end.ckpt")
    return checkpoint(root / "end.ckpt")


@pytest.mark.filterwarnings("ignore:You passed in a `val_dataloader` but have no")
def test_model_on_meta_that_shares_a_parameter_with_a_stage(
    tmp_path: Path, two_ranks: Pool
) -> None:
    with torch.random.fork_rng(devices=[]):
        expected = fit_tied(tmp_path / "single", "single")

    found = two_ranks.run(fit_tied, tmp_path / "both", "per_stage")

    assert_equal(found[0], expected)


# What is refused.


def refused(root: Path) -> list[str]:
    """What a fit says that cannot be over processes."""
    found = []
    lbfgs = Classifier()
    lbfgs.configure_optimizers = lambda: torch.optim.LBFGS(lbfgs.parameters())  # type: ignore[method-assign]
    for model, callbacks in [
        (lbfgs, []),
        (Classifier(), [StochasticWeightAveraging(0.1)]),
    ]:
        made = trainer_over(root, "per_stage", [2, 4], {}, callbacks=callbacks)
        with pytest.raises(ValueError) as error:
            made.fit(model, datamodule=Data())
        found.append(str(error.value).partition(" ")[0])
    return found


def test_what_needs_all_parameters(tmp_path: Path, two_ranks: Pool) -> None:
    names = ["LBFGS", "StochasticWeightAveraging"]

    assert two_ranks.run(refused, tmp_path) == [names, names]


class Raising(Callback):
    """Raises in one process, between forward and backward."""

    def on_before_backward(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step == 2:
            raise KeyError("a callback")


def fit_raising(root: Path) -> str:
    made = trainer_over(root, "per_stage", [2, 4], {}, callbacks=[Raising()])
    with pytest.raises((KeyError, RuntimeError)) as error:
        made.fit(Classifier(), datamodule=Data())
    return f"{type(error.value).__name__}: {error.value}"


def test_callback_that_raises_in_one_process(tmp_path: Path) -> None:
    with new_ranks(2) as ranks:
        told, raised = ranks.run(fit_raising, tmp_path)

    assert raised == "KeyError: 'a callback'"
    assert told.startswith("RankFailed: rank 1 (stage 1) failed: KeyError: 'a callback'")


def threads_after_fits(root: Path) -> list[int]:
    """How many threads a rank has after each of three fits, whose Trainers are gone."""
    counts = []
    for _ in range(3):
        trainer_over(root, "per_stage", [2, 4], {}, max_epochs=1).fit(
            Classifier(), datamodule=Data()
        )
        gc.collect()
        counts.append(len(os.listdir("/proc/self/task")))
    return counts


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_threads_of_process_groups_end_with_their_trainer(tmp_path: Path) -> None:
    """torch.distributed keeps each group, with three threads, until it is destroyed."""
    with new_ranks(2) as ranks:
        for counts in ranks.run(threads_after_fits, tmp_path):
            assert counts[0] == counts[1] == counts[2]
