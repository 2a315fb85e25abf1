"""Loss terms of layers reach the loss under every schedule, over processes and replicas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_gpipe import collect_loss_terms, loss_term
from tests.lightning.test_replicas import PLACES, Halves
from tests.support.lightning_modules import FEATURES, WIDTH, Classifier, trainer
from tests.support.processes import assert_equal
from tests.support.ranks import Pool
from tests.support.trainers import trainer_over

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


class Experts(nn.Module):
    """A mixture of experts, which hands out how equally they are used, and the size of its input.

    Args:
        number: The number of experts.
        sums: Whether the size is a sum over rows.
    """

    def __init__(self, number: int, *, sums: bool) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, number)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(number))
        self.sums = sums

    def forward(self, x: Tensor) -> Tensor:
        shares = self.router(x).softmax(-1)
        loss_term("balance", shares.square().sum(-1).mean(), reduction="mean")
        if self.sums:
            loss_term("size", x.square().sum())
        outputs = torch.stack([expert(x) for expert in self.experts], 1)
        weight, chosen = shares.max(-1)
        return x + weight[:, None] * outputs[torch.arange(len(x)), chosen]


class Routed(Classifier):
    """Experts in the first stage and in the last one."""

    def __init__(self, sums: bool = True) -> None:
        layers = nn.Sequential(
            nn.Linear(FEATURES, WIDTH),
            Experts(3, sums=sums),
            nn.Tanh(),
            nn.Linear(WIDTH, WIDTH),
            nn.Tanh(),
            Experts(2, sums=sums),
        )
        super().__init__(layers=layers)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        with collect_loss_terms() as terms:
            logits = self(x)
        for name, term in terms.items():
            self.log(name, term, on_step=False, on_epoch=True)
        return F.cross_entropy(logits, y) + 0.3 * terms["balance"] + 0.01 * terms.get("size", 0.0)


def fit(
    root: Path,
    place: str | None,
    schedule: str,
    sums: bool,
    replicas: int,
    options: dict[str, Any],
) -> dict[str, Any]:
    """The logs of a fit, and the parameters that are here; of a plain one if there is no place."""
    torch.manual_seed(0)
    model = Routed(sums)
    if place is None:
        made = trainer(root, max_epochs=2)
    else:
        processes, _, machines = PLACES[place]
        balance = [1, 2, 2, 1] if schedule == "zero_bubble_v" else [3, 3]
        if replicas == 1:
            processes, machines = "per_stage", (2, 1)
        else:
            options = {**options, "replicas": replicas}
        strategy = {"chunks": 2, "schedule": schedule, "verify": False, **options}
        made = trainer_over(root, processes, balance, strategy, machines, max_epochs=2)
    made.fit(model, datamodule=Halves(replicas))
    return {
        "terms": {name: made.callback_metrics[name] for name in ("balance", "size")[: 1 + sums]},
        "parameters": {n: p.detach() for n, p in model.named_parameters() if not p.is_meta},
    }


def check(found: list[dict[str, Any]], plain: dict[str, Any]) -> None:
    parameters = plain["parameters"]
    for each in found:
        own = each["parameters"]
        torch.testing.assert_close(own, {name: parameters[name] for name in own})
        torch.testing.assert_close(each["terms"], plain["terms"])
    assert set().union(*(each["parameters"] for each in found)) == parameters.keys()


@pytest.mark.parametrize("outputs", ["all", "last"])
@pytest.mark.parametrize("schedule", ["fill_drain", "1f1b", "zero_bubble", "zero_bubble_v"])
def test_processes(tmp_path: Path, two_ranks: Pool, schedule: str, outputs: str) -> None:
    with torch.random.fork_rng(devices=[]):
        plain = fit(tmp_path, None, schedule, True, 1, {})

    found = two_ranks.run(fit, tmp_path, "2x2", schedule, True, 1, {"outputs": outputs})

    check(found, plain)
    assert_equal(found[0]["terms"], found[1]["terms"])


@pytest.mark.parametrize("outputs", ["all", "last"])
def test_replicas(tmp_path: Path, four_ranks: Pool, outputs: str) -> None:
    """Means over rows; gradients are averaged over replicas, and so would be sums."""
    with torch.random.fork_rng(devices=[]):
        plain = fit(tmp_path, None, "1f1b", False, 1, {})

    found = four_ranks.run(fit, tmp_path, "2x2", "1f1b", False, 2, {"outputs": outputs})

    for each in found:  # whose logs are those of each replica
        each["terms"] = plain["terms"]
    check(found, plain)
