"""What is no Trainer of ``lightning.pytorch``, and what to write there instead of GPipeStrategy.

``pytorch_lightning`` has the classes of ``lightning.pytorch`` a second time, and Fabric has
strategies of its own. Both would say no more than that the strategy is "an invalid strategy name".
So they are told that it is a strategy, and what they ask of it first raises an error.
"""

from __future__ import annotations

import sys
from typing import Any, NoReturn

from lightning.fabric.strategies.strategy import Strategy as FabricStrategy
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.strategies import StrategyRegistry


def accept(kind: type) -> None:
    """Let Fabric and Trainers of ``pytorch_lightning`` take objects of ``kind`` for strategies."""
    FabricStrategy.register(kind)
    for twin in _twins():
        twin.Strategy.register(kind)


def registries() -> list[Any]:
    """What knows strategies by their names, that of ``pytorch_lightning`` if it is imported."""
    return [StrategyRegistry, *(twin.StrategyRegistry for twin in _twins())]


def _twins() -> list[Any]:
    """The strategies of ``pytorch_lightning``, if it is imported."""
    twin = sys.modules.get("pytorch_lightning.strategies")
    return [] if twin is None else [twin]


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
