"""Trainers of ``pytorch_lightning`` and Fabric, which are refused by name.

``pytorch_lightning`` has the classes of ``lightning.pytorch`` a second time, and Fabric has
strategies of its own. Both would say no more than that ours is "an invalid strategy name". So they
are told that it is a strategy, and what they ask of it first raises an error.
"""

from __future__ import annotations

import sys
from typing import Any

from lightning.fabric.strategies.strategy import Strategy as FabricStrategy
from lightning.pytorch import strategies


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
