"""Code of users that reads parameters or gradients, some of which are in other processes."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from torch import Tensor

from tests.support.lightning_modules import Classifier, Data, trainer
from tests.support.ranks import Pool, new_ranks
from tests.support.trainers import trainer_over

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


class Norms(Classifier):
    """Logs the norm of its gradients, and penalises weights."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + 0.01 * sum(x.pow(2).sum() for x in self.parameters() if not x.is_meta)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        strategy: Any = self.trainer.strategy
        for norm_type in (2, float("inf")):
            if hasattr(strategy, "grad_norm"):
                self.log_dict(strategy.grad_norm(self, norm_type))
            else:
                self.log_dict(grad_norm(self, norm_type))


def norms(root: Path, processes: str) -> Any:
    """The norms of the last step, and the weights here."""
    torch.manual_seed(0)
    model = Norms()
    made = trainer(root)
    if processes != "plain":
        made = trainer_over(root, processes, [2, 4], {})
    made.fit(model, datamodule=Data())
    logged = {k: float(x) for k, x in made.callback_metrics.items() if k.startswith("grad_")}
    return logged, {k: x.detach() for k, x in model.named_parameters() if not x.is_meta}


@pytest.mark.parametrize("processes", ["single", "per_stage"])
def test_norm_and_penalty(tmp_path: Path, two_ranks: Pool, processes: str) -> None:
    with torch.random.fork_rng(devices=[]):
        expected, weights = norms(tmp_path, "plain")
        found = [norms(tmp_path, "single")] if processes == "single" else []

    for logged, own in found or two_ranks.run(norms, tmp_path, processes):
        assert logged == pytest.approx(expected, rel=1e-6)
        assert own.keys() <= weights.keys()
        torch.testing.assert_close(own, {k: weights[k] for k in own}, rtol=1e-9, atol=1e-11)


class Penalised(Classifier):
    """Reads the parameters of all stages, or the gradients of one process's."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.kind == "sum":
            loss = loss + sum(x.pow(2).sum() for x in self.parameters())
        if self.kind == "vector":
            loss = loss + torch.nn.utils.parameters_to_vector(self.parameters()).norm()
        if self.kind == "sum in place":
            for x in self.parameters():
                loss += x.pow(2).sum()
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.kind == "item":
            [x.norm().item() for x in self.parameters()]
        if self.kind == "logged":
            self.log_dict(grad_norm(self, 2))
        if self.kind == "clipped":
            torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)
        if self.kind == "clipped by halves":
            gradients = [x.grad for x in self.parameters() if x.grad is not None]
            total = torch.nn.utils.get_total_norm(gradients)
            torch.nn.utils.clip_grads_with_norm_(self.parameters(), 0.1, total)


def fit_penalised(root: Path, kind: str) -> str:
    made = trainer_over(root, "per_stage", [2, 4], {})
    with pytest.raises(RuntimeError) as error:
        made.fit(Penalised(kind), datamodule=Data())
    return "".join(traceback.format_exception_only(error.value))


@pytest.mark.parametrize("kind", ["sum", "sum in place", "vector", "item"])
def test_penalty_on_parameters_of_other_processes(tmp_path: Path, kind: str) -> None:
    with new_ranks(2) as ranks:
        first, second = ranks.run(fit_penalised, tmp_path, kind)

    assert "got 4 of 8, such as layers.2.weight. For a penalty write the optimizer's" in first
    assert "got 2 of 8, such as layers.0.weight." in second


def test_norm_of_the_gradients_of_one_process(tmp_path: Path) -> None:
    """Lightning's function was silently too small."""
    with new_ranks(2) as ranks:
        found = ranks.run(fit_penalised, tmp_path, "logged")

    for each in found:
        assert "got log('grad_2.0_norm_total'). Write self.trainer.strategy.grad_norm(self)" in each


@pytest.mark.parametrize(
    "kind, function",
    [("clipped", "clip_grad_norm_"), ("clipped by halves", "clip_grads_with_norm_")],
)
def test_clipping_by_the_norm_of_one_process(tmp_path: Path, kind: str, function: str) -> None:
    """Each process clipped by a norm of its own: parameters around the layers went apart."""
    with new_ranks(2) as ranks:
        first, second = ranks.run(fit_penalised, tmp_path, kind)

    assert f"got {function} with 8 parameters in a process that has 4 of their" in first
    assert f"got {function} with 8 parameters in a process that has 6 of their" in second


def fit_twice(root: Path) -> str:
    """What a process is told whose second Trainer cuts the model elsewhere."""
    model = Classifier()
    trainer_over(root, "per_stage", [2, 4], {}).fit(model, datamodule=Data())
    with pytest.raises((ValueError, RuntimeError)) as error:
        trainer_over(root, "per_stage", [4, 2], {}).fit(model, datamodule=Data())
    return str(error.value)


def test_second_trainer_with_another_balance(tmp_path: Path) -> None:
    """Once PyTorch could not copy out of the meta device."""
    with new_ranks(2) as ranks:
        first, _ = ranks.run(fit_twice, tmp_path)

    assert "whose values another process has, from an earlier pipeline. Cut the" in first
