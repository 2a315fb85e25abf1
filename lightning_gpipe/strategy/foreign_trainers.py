"""Trainers of ``pytorch_lightning``, Fabric and second Trainers, which are refused by name.

``pytorch_lightning`` has the classes of ``lightning.pytorch`` a second time, and Fabric has
strategies of its own. Both would say no more than that ours is "an invalid strategy name". So they
are told that it is a strategy, and what they ask of it first raises an error.
"""

from __future__ import annotations

import sys
from typing import Any, NoReturn

from lightning.fabric.strategies.strategy import Strategy as FabricStrategy
from lightning.pytorch import strategies
from lightning.pytorch.accelerators import Accelerator


def accept(kind: type) -> None:
    """Let Fabric and Trainers of ``pytorch_lightning`` take objects of ``kind`` for strategies."""
    for base in (FabricStrategy, *(module.Strategy for module in _modules())):
        base.register(kind)


def registries() -> list[Any]:
    """The registries of strategies, that of ``pytorch_lightning`` too if it is imported."""
    return [module.StrategyRegistry for module in _modules()]


def _modules() -> list[Any]:
    twin = sys.modules.get("pytorch_lightning.strategies")
    return [strategies] if twin is None else [strategies, twin]


def refuse_a_second_trainer(accelerator: Accelerator | None) -> None:
    """Refuse a second Trainer; the first one has set its accelerator."""
    if accelerator is not None:
        raise RuntimeError(
            "a GPipeStrategy object belongs to one Trainer: got one that another Trainer has. "
            "Write GPipeStrategy(...) again for this Trainer, or use the first Trainer again."
        )


def refuse_fabric() -> NoReturn:
    """Refuse Fabric, which reads an attribute that no Trainer reads."""
    raise TypeError(
        "GPipeStrategy is for a Trainer, whose LightningModule it pipes: got Fabric, which has "
        "none. Write Fabric(devices=1), and pipe the model by itself: "
        "fabric.setup(GPipe(model, balance, devices=[...]), move_to_device=False)."
    )


def refuse_a_twin(accelerator: object) -> None:
    """Refuse a Trainer of ``pytorch_lightning``, by the accelerator that it sets."""
    if not isinstance(accelerator, Accelerator):
        raise TypeError(
            "GPipeStrategy is for Trainers of lightning.pytorch: got one of "
            f"{type(accelerator).__module__.split('.')[0]}, whose classes are others. Write "
            "`import lightning as L`, and L.Trainer, L.LightningModule and L.Callback everywhere."
        )
