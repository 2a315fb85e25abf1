"""Averages of the weights over several processes, of which each has those of its own stages."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch.callbacks as library
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from tests.lightning.test_processes import checkpoint
from tests.support.lightning_modules import Classifier, Data, six_layers, trainer
from tests.support.ranks import Pool
from tests.support.trainers import trainer_over

pytestmark = [
    pytest.mark.usefixtures("one_intra_op_thread"),
    pytest.mark.skipif(not hasattr(library, "WeightAveraging"), reason="new in Lightning 2.6"),
]


class Recurrent(nn.Module):
    """A recurrent layer on one step, which keeps weak references to its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Map (rows, 8) to (rows, 8)."""
        y: Tensor = self.rnn(x[:, None])[0]
        return y[:, 0]


def normed() -> Classifier:
    layers = six_layers()
    layers[1], layers[3], layers[5] = nn.BatchNorm1d(8), nn.BatchNorm1d(8), Recurrent()
    return Classifier(layers=layers)


AVERAGES = {
    "equal": lambda: library.WeightAveraging(),
    "moving": lambda: library.EMAWeightAveraging(decay=0.8, update_starting_at_step=2),
    "on the CPU": lambda: library.EMAWeightAveraging("cpu", use_buffers=False, decay=0.8),
}


def fit(
    root: Path,
    processes: str,
    name: str,
    epochs: int,
    resumed: Path | None = None,
    outputs: str = "all",
    balance: Sequence[int] = (2, 4),
) -> Any:
    """A fit, with checkpoints of each epoch, and the metrics and weights at its end."""
    torch.manual_seed(0)
    model = normed() if balance[1] > 1 else Classifier()
    saved = ModelCheckpoint(root, "{epoch}", save_top_k=-1)
    options: dict[str, Any] = {
        "callbacks": [AVERAGES[name](), saved],
        "enable_checkpointing": True,
        "max_epochs": epochs,
    }
    if processes == "plain":
        made = trainer(root, **options)
    else:
        strategy = {"chunks": 1, "outputs": outputs}
        made = trainer_over(root, processes, list(balance), strategy, **options)
    made.fit(model, datamodule=Data(), ckpt_path=resumed)
    made.save_checkpoint(root / "end.ckpt")
    metrics = {k: float(x) for k, x in made.callback_metrics.items()}
    return metrics, {k: x.detach() for k, x in model.state_dict().items() if not x.is_meta}


@pytest.mark.parametrize("outputs", ["all", "last"])
@pytest.mark.parametrize("name", AVERAGES)
def test_fit_and_resumed_fit(tmp_path: Path, two_ranks: Pool, name: str, outputs: str) -> None:
    plain, both, again = (tmp_path / each for each in ("plain", "both", "again"))
    with torch.random.fork_rng(devices=[]):
        metrics, weights = fit(plain, "plain", name, 3)

    close = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-11)
    first = two_ranks.run(fit, both, "per_stage", name, 3, None, outputs)
    second = two_ranks.run(fit, again, "per_stage", name, 3, both / "epoch=1.ckpt", outputs)
    for found, own in (*first, *second):
        assert found == pytest.approx(metrics, rel=1e-6)
        close(own, {name: weights[name] for name in own})
    for file in ("epoch=1.ckpt", "epoch=2.ckpt", "end.ckpt"):
        one, other = (checkpoint(run / file) for run in (both, plain))
        for part in ("state_dict", "current_model_state", "averaging_state"):
            close(one[part], other[part])
    close(
        checkpoint(again / "end.ckpt")["state_dict"], checkpoint(plain / "end.ckpt")["state_dict"]
    )


def test_average_if_a_stage_has_no_parameters(tmp_path: Path, two_ranks: Pool) -> None:
    """Once the process that has all parameters saved without the other one, which waited for it."""
    plain, both = tmp_path / "plain", tmp_path / "both"
    with torch.random.fork_rng(devices=[]):
        fit(plain, "plain", "equal", 1, balance=(5, 1))

    two_ranks.run(fit, both, "per_stage", "equal", 1, None, "all", (5, 1))

    one, other = (checkpoint(run / "end.ckpt")["state_dict"] for run in (both, plain))
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)
