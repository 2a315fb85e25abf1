"""Plain checkpoints: a resumed run equals the uninterrupted one, to the bit.

Here are also the tests of ``resuming``.
"""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder

from lightning_gpipe import GPipeStrategy
from tests.support.lightning_modules import Classifier, trainer
from tests.support.processes import assert_equal
from tests.support.ranks import Pool
from tests.support.resumable import (
    Drawing,
    ResumableData,
    SavesAt,
    seed_all,
)
from tests.support.trainers import trainer_over

pytestmark = pytest.mark.usefixtures("one_intra_op_thread", "own_generator")

EPOCHS = 3
MIDDLE: dict[str, Any] = {"step": 5}  # of the second epoch, of three steps
LAST: dict[str, Any] = {"step": 3}  # of the first epoch
END: dict[str, Any] = {"epoch": 1}
VALIDATED: dict[str, Any] = {"validation": 1}
WHEN = {"middle": MIDDLE, "last step": LAST, "end": END, "validated": VALIDATED}
Way = tuple[str, list[int], Any, dict[str, Any]]
ALONE: Way = ("single", [2, 4], None, {})
STAGES: Way = ("per_stage", [2, 4], None, {})
REPLICAS: Way = ("single", [2, 4], (4, 1), {"replicas": 2})


def fit(root: Path, way: Way, *, seed: int, data: Any = (True,), **options: Any) -> Any:
    """A fit from a seed, or from a checkpoint; what it comes to.

    Args:
        root: Where it writes to.
        way: In which processes it runs.
        seed: Of all generators.
        data: Arguments of its data.
        options: When it saves, or ``ckpt_path``.
    """
    seed_all(seed)
    model = Drawing()
    processes, balance, machines, strategy = way
    path = options.pop("ckpt_path", None)
    saves = SavesAt(root / "half.ckpt", **options) if options else None
    made = trainer_over(
        root,
        processes,
        balance,
        {"activation_checkpointing": "always", **strategy},
        machines,
        max_epochs=EPOCHS,
        callbacks=[] if saves is None else [saves],
    )
    made.fit(model, datamodule=ResumableData(*data), ckpt_path=path)
    return {
        "weights": {name: x for name, x in model.state_dict().items() if not x.is_meta},
        "step": made.global_step,
        "next": [torch.rand(1), random.random(), float(np.random.random())],
    }


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("resumable", [True, False])
def test_resumed_run(tmp_path: Path, when: str, resumable: bool) -> None:
    """With an ordinary loader too, but in the middle of an epoch, of which Lightning warns."""
    if when == "middle" and not resumable:
        pytest.skip("an ordinary loader cannot")
    run = partial(fit, tmp_path, ALONE, data=(resumable,))

    whole = run(seed=1, **WHEN[when])
    resumed = run(seed=2, ckpt_path=tmp_path / "half.ckpt")

    assert_equal(resumed, whole)


@pytest.mark.parametrize("when", ["middle", "validated"])
@pytest.mark.parametrize("way", [STAGES, REPLICAS], ids=["stages", "replicas"])
def test_resumed_processes(tmp_path: Path, two_ranks: Pool, way: Way, when: str) -> None:
    whole = two_ranks.run(partial(fit, tmp_path, way, seed=1, **WHEN[when]))

    resumed = two_ranks.run(partial(fit, tmp_path, way, seed=2, ckpt_path=tmp_path / "half.ckpt"))

    assert_equal(resumed, whole)


@pytest.mark.parametrize("way", [ALONE, STAGES, REPLICAS], ids=["one", "stages", "replicas"])
def test_loader_with_a_generator_of_its_own(tmp_path: Path, two_ranks: Pool, way: Way) -> None:
    """Lightning saves none, and goes on in another order; a plain run does."""
    run = partial(fit, tmp_path, way, data=(False, 7, True))

    def in_all(**options: Any) -> Any:
        return run(**options) if way is ALONE else two_ranks.run(partial(run, **options))

    whole = in_all(seed=1, **END)
    resumed = in_all(seed=2, ckpt_path=tmp_path / "half.ckpt")

    assert_equal(resumed, whole)


def test_checkpoint_of_one_process_in_two(tmp_path: Path, two_ranks: Pool) -> None:
    whole = fit(tmp_path, ALONE, seed=1, **MIDDLE)

    resumed = two_ranks.run(
        partial(fit, tmp_path, STAGES, seed=2, ckpt_path=tmp_path / "half.ckpt")
    )

    found = resumed[0]["weights"] | resumed[1]["weights"]
    assert_equal({name: found[name] for name in whole["weights"]}, whole["weights"])
    assert [each["next"] for each in resumed] == [whole["next"]] * 2


def test_folder_of_parts(tmp_path: Path, two_ranks: Pool) -> None:
    way = ("per_stage", [2, 4], None, {"save_distributed_checkpoint": True})
    whole = two_ranks.run(partial(fit, tmp_path, way, seed=1, **MIDDLE))

    path = tmp_path / "half.ckpt"
    resumed = two_ranks.run(partial(fit, tmp_path, way, seed=2, ckpt_path=path))

    assert path.is_dir()
    assert_equal(resumed, whole)


# What has no part in it.


def test_plain_trainer_goes_on_from_a_pipeline_and_back(tmp_path: Path) -> None:
    fit(tmp_path, ALONE, seed=1, **MIDDLE)
    plain = trainer(tmp_path, max_epochs=EPOCHS)

    plain.fit(Drawing(), datamodule=ResumableData(), ckpt_path=tmp_path / "half.ckpt")
    plain.save_checkpoint(tmp_path / "plain.ckpt")
    assert "lightning_gpipe" not in torch.load(tmp_path / "plain.ckpt")

    longer = trainer(tmp_path, GPipeStrategy([2, 4]), devices=2, max_epochs=EPOCHS + 1)
    longer.fit(Drawing(), datamodule=ResumableData(), ckpt_path=tmp_path / "plain.ckpt")
    assert longer.global_step == 3 * (EPOCHS + 1)


def test_weights_alone_have_no_generators(tmp_path: Path) -> None:
    made = trainer(tmp_path, GPipeStrategy([2, 4]), devices=2, max_epochs=1)
    made.fit(Drawing(), datamodule=ResumableData())

    made.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)

    assert "lightning_gpipe" not in torch.load(tmp_path / "weights.ckpt")


def test_evaluation_leaves_the_generators_alone(tmp_path: Path) -> None:
    fit(tmp_path, ALONE, seed=1, **END)
    made = trainer(tmp_path, GPipeStrategy([2, 4]), devices=2, max_epochs=EPOCHS + 1)
    model, data = Drawing(), ResumableData()

    seed_all(5)
    made.validate(model, data, ckpt_path=tmp_path / "half.ckpt", verbose=False)
    found = torch.rand(1), random.random(), np.random.random()
    seed_all(5)

    assert_equal(found, (torch.rand(1), random.random(), np.random.random()))


def test_restoring_in_a_fit_leaves_the_generators_alone(tmp_path: Path) -> None:
    """The order of the batches after a search for a learning rate is that of a plain run."""

    def order(strategy: Any, devices: int) -> list[Any]:
        seen: list[Any] = []
        seed_all(3)
        made = trainer(
            tmp_path,
            strategy,
            devices=devices,
            callbacks=[LearningRateFinder(num_training_steps=3, update_attr=True)],
            max_epochs=2,
        )
        model = Searched(seen)
        made.fit(model, datamodule=ResumableData(resumable=False))
        return seen[-6:]

    assert_equal(order(GPipeStrategy([2, 4]), 2), order("auto", 1))


class Searched(Classifier):
    """A learning rate that is looked for; notes its batches."""

    def __init__(self, seen: list[Any]) -> None:
        super().__init__()
        self.lr = 0.01
        self.seen = seen

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(batch[1])
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)
