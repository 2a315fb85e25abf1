"""Pipeline parallelism for PyTorch Lightning: GPipe as a strategy."""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_gpipe.callbacks import PipelineMonitor, Rebalance, StepInBackward
from lightning_gpipe.core.balance import LayerProfile, ModelProfile, Place
from lightning_gpipe.core.data import (
    MicroBatching,
    PaddedSequences,
    Rows,
    collect_loss_terms,
    loss_in_pieces,
    loss_term,
    whole,
)
from lightning_gpipe.core.faithful import is_recomputing
from lightning_gpipe.core.pipeline import (
    GPipe,
    balance_by_memory,
    balance_by_parameters,
    balance_by_time,
    plan,
    profile,
)
from lightning_gpipe.core.planner import Plan
from lightning_gpipe.core.run import Timeline
from lightning_gpipe.core.schedules import Schedule
from lightning_gpipe.core.transport import OutOfStep, RankFailed
from lightning_gpipe.core.verify import LossParity, Parity, StepParity, verify, verify_step
from lightning_gpipe.strategy import GPipeStrategy
from lightning_gpipe.version import __version__ as __version__

__all__ = [
    "GPipe",
    "GPipeStrategy",
    "LayerProfile",
    "LossParity",
    "MicroBatching",
    "ModelProfile",
    "OutOfStep",
    "PaddedSequences",
    "Parity",
    "PipelineMonitor",
    "Place",
    "Plan",
    "RankFailed",
    "Rebalance",
    "Rows",
    "Schedule",
    "StepInBackward",
    "StepParity",
    "Timeline",
    "balance_by_memory",
    "balance_by_parameters",
    "balance_by_time",
    "collect_loss_terms",
    "is_recomputing",
    "loss_in_pieces",
    "loss_term",
    "plan",
    "profile",
    "verify",
    "verify_step",
    "whole",
]

# A Trainer converts names to lower case, also the class's and its path.
for _name in ("gpipe", "gpipestrategy", "lightning_gpipe.gpipestrategy"):
    if _name not in StrategyRegistry:  # as after importlib.reload
        StrategyRegistry.register(_name, GPipeStrategy, description=GPipeStrategy.__doc__)
