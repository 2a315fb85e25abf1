"""Plain checkpoints: a checkpoint equals that of a plain Trainer and loads anywhere.

Here are also the tests of ``checkpointing`` and ``portable``.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_gpipe import GPipeStrategy
from tests.support.checkpoints import leaves, load, numbers, structure
from tests.support.lightning_modules import (
    WIDTH,
    Classifier,
    Data,
    assert_same_weights,
    fitted,
    rows,
    trainer,
)

# Ways to run: (strategy, devices). A Trainer keeps its strategy, so each run makes one.
Way = tuple[list[int] | str | None, int]
PLAIN: Way = (None, 1)
PIPED: Way = ([2, 4], 2)


def options_of(way: Way) -> dict[str, Any]:
    balance, devices = way
    strategy: Any = "auto" if balance is None else GPipeStrategy(balance, chunks=3)  # type: ignore[arg-type]  # a list or "parameters"
    return {"strategy": strategy, "devices": devices}


@pytest.fixture(scope="module", params=["momentum", "adam"])
def optimizer(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def build(optimizer: str) -> partial[Classifier]:
    return partial(Classifier, optimizer=optimizer, scheduled=True)


def saved(root: Path, build: Any, way: Way) -> dict[str, Path]:
    """The checkpoints of a fit of 4 epochs: after 2 of them, and after the fit was torn down."""
    each = ModelCheckpoint(root, "{epoch}", save_top_k=-1)
    options: dict[str, Any] = {"callbacks": [each], "enable_checkpointing": True, "max_epochs": 4}
    made = fitted(root, build=build, **options, **options_of(way))
    made.save_checkpoint(root / "end.ckpt")
    return {"half": root / "epoch=1.ckpt", "end": root / "end.ckpt"}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, build: Any) -> dict[str, Path]:
    return saved(tmp_path_factory.mktemp("plain"), build, PLAIN)


@pytest.fixture(scope="module")
def pipelined(tmp_path_factory: pytest.TempPathFactory, build: Any) -> dict[str, Path]:
    return saved(tmp_path_factory.mktemp("pipelined"), build, PIPED)


@pytest.mark.parametrize("when", ["half", "end"])
def test_structure(plain: dict[str, Path], pipelined: dict[str, Path], when: str) -> None:
    expected, found = load(plain[when]), load(pipelined[when])

    # The callback that saved writes the folder of the run into its keys' values only.
    assert found.pop("lightning_gpipe").keys() == {"generators"}
    assert structure(found) == structure(expected)
    assert found["state_dict"]._metadata == expected["state_dict"]._metadata
    for one, other in zip(found["optimizer_states"], expected["optimizer_states"], strict=True):
        assert one["param_groups"][0]["params"] == other["param_groups"][0]["params"]
        assert list(one["state"]) == list(other["state"])


@pytest.mark.parametrize("when", ["half", "end"])
def test_contents(plain: dict[str, Path], pipelined: dict[str, Path], when: str) -> None:
    expected, found = load(plain[when]), load(pipelined[when])

    torch.testing.assert_close(numbers(found), numbers(expected))
    for key in ("epoch", "global_step", "hyper_parameters"):
        assert found[key] == expected[key]


@pytest.mark.parametrize("when", ["half", "end"])
def test_tensors_are_on_the_cpu_and_belong_to_nothing(
    pipelined: dict[str, Path], when: str
) -> None:
    tensors = {
        path: leaf for path, leaf in leaves(load(pipelined[when])) if isinstance(leaf, Tensor)
    }

    assert len(tensors) > 16
    assert all(t.device.type == "cpu" and not t.requires_grad for t in tensors.values())


def test_plain_load_of_a_pipelines_weights_only(pipelined: dict[str, Path]) -> None:
    # No class of this package is in the file: PyTorch's safe loader takes it.
    assert torch.load(pipelined["half"], weights_only=True)["epoch"] == 1


@pytest.mark.parametrize(
    "way",
    [PLAIN, PIPED, ([1, 5], 2), ([2, 2, 2], 3), ([2, 1, 1, 2], 2), ("parameters", 2)],
    ids=str,
)
@pytest.mark.parametrize("source", ["plain", "pipelined"])
def test_resumed_fit_ends_like_one_that_was_not_interrupted(
    tmp_path: Path,
    request: pytest.FixtureRequest,
    build: Any,
    plain: dict[str, Path],
    source: str,
    way: Way,
) -> None:
    half = request.getfixturevalue(source)["half"]

    resumed = fitted(tmp_path, build=build, ckpt_path=half, max_epochs=4, **options_of(way))
    resumed.save_checkpoint(tmp_path / "end.ckpt")

    expected, found = load(plain["end"]), load(tmp_path / "end.ckpt")
    assert found["global_step"] == expected["global_step"] == 4 * 3
    torch.testing.assert_close(numbers(found), numbers(expected))


def test_checkpoint_without_states_of_optimizers(
    tmp_path: Path, build: Any, plain: dict[str, Path]
) -> None:
    """It ended with a ValueError of zip, where a plain Trainer lets the optimizers begin anew."""
    file = tmp_path / "weights.ckpt"
    torch.save({**load(plain["half"]), "optimizer_states": [], "lr_schedulers": []}, file)

    one, other = (
        fitted(tmp_path, build=build, ckpt_path=file, max_epochs=4, **options_of(way))
        for way in (PLAIN, PIPED)
    )

    assert_same_weights(one, other)


@pytest.mark.parametrize("when", ["half", "end"])
def test_load_from_checkpoint(pipelined: dict[str, Path], optimizer: str, when: str) -> None:
    model = Classifier.load_from_checkpoint(pipelined[when])

    assert model.hparams == {"optimizer": optimizer, "scheduled": True}
    torch.testing.assert_close(dict(model.state_dict()), dict(load(pipelined[when])["state_dict"]))
    model(rows(3, seed=5).tensors[0])


def test_evaluation_of_a_checkpoint(tmp_path: Path, build: Any, plain: dict[str, Path]) -> None:
    results = [
        trainer(tmp_path, **options_of(way)).validate(
            build(), datamodule=Data(), ckpt_path=plain["half"], verbose=False
        )
        for way in (PLAIN, PIPED)
    ]

    torch.testing.assert_close(results[1], results[0])


def test_best_and_last(tmp_path: Path) -> None:
    def run(way: Way) -> tuple[L.Trainer, ModelCheckpoint]:
        root = tmp_path / str(way[1])
        keep = ModelCheckpoint(
            root, "{epoch}", monitor="val_loss", mode="max", save_top_k=2, save_last=True
        )
        options: dict[str, Any] = {
            "callbacks": [keep],
            "enable_checkpointing": True,
            "max_epochs": 4,
        }
        return fitted(root, **options, **options_of(way)), keep

    (_, expected), (made, found) = run(PLAIN), run(PIPED)

    assert Path(found.best_model_path).name == Path(expected.best_model_path).name == "epoch=0.ckpt"
    torch.testing.assert_close(found.best_model_score, expected.best_model_score)
    names = sorted(path.name for path in (tmp_path / "2").iterdir())
    assert names == ["epoch=0.ckpt", "epoch=1.ckpt", "last.ckpt"]
    # The same Trainer finds its own files again.
    (best,) = made.validate(datamodule=Data(), ckpt_path="best", verbose=False)
    assert best["val_loss"] == pytest.approx(float(found.best_model_score or 0))


def test_buffers_of_deferred_batch_norm_are_not_saved(tmp_path: Path) -> None:
    def build() -> Classifier:
        return Classifier(layers=nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, WIDTH), nn.ReLU()))

    ways = PLAIN, ([1, 2], 2)
    one, other = (fitted(tmp_path, build=build, **options_of(way)) for way in ways)

    assert list(one.lightning_module.state_dict()) == list(other.lightning_module.state_dict())


def test_weights_of_another_size(tmp_path: Path, build: Any, plain: dict[str, Path]) -> None:
    other = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, WIDTH))
    made = trainer(tmp_path, GPipeStrategy([2, 1]), devices=2)

    with pytest.raises(RuntimeError, match="size mismatch for layers.0.weight"):
        made.fit(Classifier(layers=other), datamodule=Data(), ckpt_path=plain["half"])


def test_model_that_is_connected_before_it_has_a_trainer(tmp_path: Path) -> None:
    """Once it raised that the model is not attached to a Trainer; Lightning's strategies do not."""
    made, model = trainer(tmp_path, GPipeStrategy([3, 3]), devices=2), Classifier()
    made.strategy.connect(model)

    made.save_checkpoint(tmp_path / "begin.ckpt")

    saved = load(tmp_path / "begin.ckpt")["state_dict"]
    torch.testing.assert_close(dict(saved), dict(model.state_dict()), rtol=0, atol=0)
