"""A Trainer over several processes ends where one in a single process does, to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn

from tests.support.lightning_modules import Classifier, Data, six_layers
from tests.support.ranks import Pool
from tests.support.trainers import trainer_over

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")

BALANCE = {"per_stage": [2, 4], "per_node": [1, 2, 2, 1]}


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Pool]:
    pool = Pool(2)
    yield pool
    pool.close()


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
    """What a checkpoint has, but for the folder that it is in."""
    loaded: dict[str, Any] = torch.load(path, weights_only=False)
    del loaded["callbacks"]
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
