"""Drawn LightningModules: pipelines among other layers, a training step, optimizers and logs.

A Trainer says in which precision.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from tests.support.drawn_parts import Part
from tests.support.lightning_modules import CLASSES
from tests.support.vocabulary import EPS, T, W

Values = dict[str, Any]  # of a training step
Log = Callable[["Drawn", Values], None]


def _metric(module: Drawn, values: Values) -> None:
    module.accuracy(values["logits"], values["y"])
    module.log("accuracy", module.accuracy, on_step=True, on_epoch=True)


def _value(module: Drawn, values: Values) -> None:
    right = module.value(values["logits"], values["y"])
    module.log("value", right, on_step=True, on_epoch=True, batch_size=len(values["y"]))


def _updated(module: Drawn, values: Values) -> None:
    module.mean.update(values["losses"].detach())
    module.log("mean", module.mean, on_step=False, on_epoch=True)


LOGS: dict[str, Log] = {
    "loss": lambda module, v: module.log("loss", v["loss"], on_step=True, on_epoch=True),
    "sized": lambda module, v: module.log(
        "sized", v["losses"].mean(), on_step=True, on_epoch=True, batch_size=len(v["y"])
    ),
    "float": lambda module, v: module.log(
        "float", float(v["loss"].detach()), on_step=True, on_epoch=True
    ),
    "count": lambda module, v: module.log(
        "count", (v["y"] == 0).sum().float(), reduce_fx="sum", on_step=True, on_epoch=True
    ),
    "largest": lambda module, v: module.log_dict(
        {"largest": v["losses"].max()}, reduce_fx="max", prog_bar=True
    ),
    "metric": _metric,
    "value of a metric": _value,
    "updated metric": _updated,
}

OPTIMIZERS: dict[str, Callable[[Drawn], torch.optim.Optimizer]] = {
    "momentum": lambda module: torch.optim.SGD(module.parameters(), 0.1, 0.9),
    "adam": lambda module: torch.optim.Adam(module.parameters(), 0.02, eps=0.01),
    "groups": lambda module: torch.optim.AdamW(
        [
            {"params": [*module.parts.parameters()], "weight_decay": 0.1},
            {"params": [*module.enter.parameters(), *module.head.parameters()], "lr": 0.03},
        ],
        0.02,
        eps=0.01,
    ),
}
_schedulers = torch.optim.lr_scheduler
SCHEDULERS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "none": lambda optimizer: {},
    "epochs": lambda optimizer: {"lr_scheduler": _schedulers.StepLR(optimizer, 1, 0.5)},
    "steps": lambda optimizer: {
        "lr_scheduler": {
            "scheduler": _schedulers.ExponentialLR(optimizer, 0.8),
            "interval": "step",
        }
    },
    "plateau": lambda optimizer: {
        "lr_scheduler": {
            "scheduler": _schedulers.ReduceLROnPlateau(optimizer, factor=0.5, patience=0),
            "monitor": "val_loss",
        }
    },
}


ENTER: dict[str, Callable[[], nn.Module]] = {
    "nothing": nn.Identity,
    "linear": lambda: nn.Linear(W, W),
    "embedding": lambda: nn.Embedding(5, W),
    "batch norm": lambda: nn.BatchNorm1d(T, EPS),  # of the whole batch
}


@dataclass(frozen=True)
class Model:
    """A LightningModule.

    Attributes:
        parts: The pipelines, one after another.
        enter: What comes before them, a name in :data:`ENTER`.
        skip: Whether that is added to what they return.
        loss: "mean", "weighted" by values in the batch, "penalised" by what comes before the parts,
            or a mean with "manual" optimization by two optimizers.
        logs: Names in :data:`LOGS`.
        optimizer: A name in :data:`OPTIMIZERS`.
        scheduler: A name in :data:`SCHEDULERS`.
    """

    parts: tuple[Part, ...]
    enter: str
    skip: bool
    loss: str
    logs: tuple[str, ...]
    optimizer: str
    scheduler: str


class Drawn(L.LightningModule):
    """Does what a :class:`Model` says."""

    enter: nn.Module
    parts: nn.ModuleList
    head: nn.Linear

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model
        self.enter = ENTER[model.enter]()
        self.parts = nn.ModuleList(part.build() for part in model.parts)
        self.head = nn.Linear(W, CLASSES)
        self.accuracy, self.mean = MulticlassAccuracy(CLASSES), MeanMetric()
        self.value = MulticlassAccuracy(CLASSES, average="micro")
        self.automatic_optimization = self.model.loss != "manual"
        self.train()  # so that layers that keep eval mode are in it

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        x = first = self.enter(batch["tokens" if self.model.enter == "embedding" else "x"])
        for part, module in zip(self.model.parts, self.parts, strict=True):
            x = part.run(module, x, batch["mask"])
        x = (x + first if self.model.skip else x).mean(1)
        return self.head(F.layer_norm(x, (W,), eps=EPS)), first  # a norm, lest a fit diverges

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits, first = self(batch)
        losses = F.cross_entropy(logits, batch["y"], reduction="none")
        loss, weight = losses.mean(), batch["weight"]
        if self.model.loss == "weighted":
            loss = (losses * weight).sum() / weight.sum()
        elif self.model.loss == "penalised":
            loss = loss + 0.1 * first.square().mean()
        self.log("train", losses.mean(), on_step=False, on_epoch=True, batch_size=len(losses))
        values = {"logits": logits, "y": batch["y"], "losses": losses, "loss": loss}
        for name in self.model.logs:
            LOGS[name](self, values)
        if not self.automatic_optimization:
            return self._optimize(loss)
        weights = {"loss_weight": weight.sum()} if self.model.loss == "weighted" else {}
        return {"loss": loss, **weights, "logits": logits.detach()}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits, _ = self(batch)
        self.log("val_loss", F.cross_entropy(logits, batch["y"]))

    def configure_optimizers(self) -> Any:
        if not self.automatic_optimization:
            around = [*self.enter.parameters(), *self.head.parameters()]
            return [torch.optim.SGD(each, 0.1) for each in (self.parts.parameters(), around)]
        optimizer = OPTIMIZERS[self.model.optimizer](self)
        return {"optimizer": optimizer, **SCHEDULERS[self.model.scheduler](optimizer)}

    def _optimize(self, loss: Tensor) -> None:
        optimizers: Any = self.optimizers()
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def rows(count: int, seed: int) -> list[dict[str, Tensor]]:
    """Rows, with classes that depend on them."""
    torch.manual_seed(seed)
    x = torch.randn(count, T, W)
    return [
        {
            "x": row,
            # The first ones differ, for operators that mix rows by their distances.
            "tokens": torch.cat([torch.tensor([k % 5]), torch.randint(5, (T - 1,))]),
            "mask": torch.rand(T, 1),
            "weight": torch.randint(1, 4, ()).float(),
            "y": row.mean(0).argmax() % CLASSES,
        }
        for k, row in enumerate(x)
    ]


def models(
    parts: st.SearchStrategy[tuple[Part, ...]], *, by_rows: bool
) -> st.SearchStrategy[Model]:
    """Models with these pipelines, whose loss may be for a part of the rows."""
    losses = ["mean", "weighted", "penalised", *([] if by_rows else ["manual"])]
    return st.builds(
        Model,
        parts=parts,
        enter=st.sampled_from(sorted(ENTER.keys() - ({"batch norm"} if by_rows else set()))),
        skip=st.booleans(),
        loss=st.sampled_from(losses),
        logs=st.lists(st.sampled_from(sorted(LOGS)), max_size=4, unique=True).map(tuple),
        optimizer=st.sampled_from(sorted(OPTIMIZERS)),
        scheduler=st.sampled_from(sorted(SCHEDULERS)),
    )
