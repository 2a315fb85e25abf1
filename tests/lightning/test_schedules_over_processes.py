"""Fits with a loss for each micro-batch over processes and replicas end as in one process.

That those equal a plain Trainer is proven in `test_schedules.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.lightning.test_processes import assert_equal, checkpoint
from tests.lightning.test_replicas import PLACES, Halves, Logging, result
from tests.lightning.test_schedules import Embedded, Padded, Record
from tests.support.lightning_modules import Data, six_layers, trainer
from tests.support.ranks import Pool
from tests.support.trainers import MODES, trainer_over

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


class Dropping(Embedded):
    """Draws in layers and around them, and has a batch norm in a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = nn.Sequential(nn.Dropout(0.2), nn.BatchNorm1d(8).double())
        self.drop = nn.Dropout(0.1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return super().training_step((self.drop(x), y), batch_idx)


MODELS = {"dropping": Dropping, "padded": Padded}


# A block of four stages that go down two devices and back.
FOLDED = [[0, 9], [1, 8], [2, 7], [3, 6]]


def balance_of(schedule: Any, mode: str) -> list[int]:
    stages = MODES[mode][0] * (2 if schedule in ("zero_bubble_v", FOLDED) else 1)
    return [6 // stages + (k < 6 % stages) for k in range(stages)]


def fit(
    root: Path,
    processes: str,
    mode: str,
    schedule: Any,
    name: str,
    options: dict[str, Any],
    **strategy: Any,
) -> dict[str, Any]:
    """A fit with validation, and what came of it in this process."""
    torch.manual_seed(0)
    model, record = MODELS[name](), Record()
    made = trainer_over(
        root,
        processes,
        balance_of(schedule, mode),
        {"chunks": 4, "schedule": schedule, "verify": False, **strategy},
        (MODES[mode][0], 1) if processes == "single" else None,
        callbacks=[record],
        max_epochs=2,
        **options,
    )
    made.fit(model, datamodule=Data(shuffle=True))
    made.save_checkpoint(root / "end.ckpt")
    return {
        "calls": record.calls,
        "logged": record.logged,
        "outputs": record.outputs,
        "end": {key: float(value) for key, value in made.callback_metrics.items()},
        "parameters": {n: p.detach() for n, p in model.named_parameters() if not p.is_meta},
        "random": torch.rand(()),
    }


@pytest.mark.parametrize(
    "mode, schedule, name, options",
    [
        ("per_stage", "1f1b", "dropping", {}),
        ("per_node", "1f1b", "dropping", {"accumulate_grad_batches": 2}),
        ("per_stage", "zero_bubble", "dropping", {"gradient_clip_val": 0.05}),
        ("per_stage", "zero_bubble_v", "dropping", {"precision": "bf16-mixed"}),
        ("per_node", "1f1b", "padded", {}),
        ("per_stage", FOLDED, "dropping", {}),
    ],
    ids=["1f1b", "per node", "zero bubble", "zero bubble, V", "padded", "block, V"],
)
def test_fit(
    tmp_path: Path,
    two_ranks: Pool,
    mode: str,
    schedule: Any,
    name: str,
    options: dict[str, Any],
) -> None:
    args = mode, schedule, name, options
    with torch.random.fork_rng(devices=[]):
        expected = fit(tmp_path / "single", "single", *args)

    found = two_ranks.run(fit, tmp_path / "both", mode, *args)

    parameters, everywhere = expected.pop("parameters"), set[str]()
    for each in found:
        own = each.pop("parameters")
        assert_equal(own, {name: parameters[name] for name in own})
        assert_equal(each, expected)
        everywhere |= own.keys()
    assert everywhere == parameters.keys()
    assert_equal(*(checkpoint(tmp_path / run / "end.ckpt") for run in ("both", "single")))


# Replicas.


def replicas(root: Path, place: str, schedule: Any, options: dict[str, Any]) -> dict[str, Any]:
    """A fit of two replicas, each with half of each batch."""
    torch.manual_seed(0)
    model = Logging("momentum", six_layers())
    processes, balance, machines = PLACES[place]
    made = trainer_over(
        root,
        processes,
        balance,
        {"chunks": 4, "replicas": 2, "schedule": schedule},
        machines,
        max_epochs=2,
        **options,
    )
    made.fit(model, datamodule=Halves(2))
    return result(model, made)


@pytest.mark.parametrize(
    "place, schedule, options",
    [
        ("2x1", "1f1b", {}),
        ("2x2", "1f1b", {"accumulate_grad_batches": 2}),
        ("2x2", "zero_bubble", {}),
        ("2x2 nodes", "1f1b", {"gradient_clip_val": 0.05}),
    ],
    ids=["2x1", "accumulated", "zero bubble", "nodes"],
)
def test_replicas(
    tmp_path: Path,
    two_ranks: Pool,
    four_ranks: Pool,
    place: str,
    schedule: str,
    options: dict[str, Any],
) -> None:
    ranks = two_ranks if place == "2x1" else four_ranks
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        plain = Logging("momentum", six_layers())
        made = trainer(tmp_path, max_epochs=2, **options)
        made.fit(plain, datamodule=Halves(1))
        expected = result(plain, made)

    for found in ranks.run(replicas, tmp_path, place, schedule, options):
        assert found["step"] == expected["step"]
        own = found["parameters"]
        torch.testing.assert_close(own, {name: expected["parameters"][name] for name in own})
        torch.testing.assert_close(found["logged"], expected["logged"])
