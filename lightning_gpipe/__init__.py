"""Pipeline parallelism for PyTorch Lightning: GPipe as a strategy."""

from lightning_gpipe.callbacks import PipelineMonitor, Rebalance
from lightning_gpipe.core.data import (
    MicroBatching,
    PaddedSequences,
    Rows,
    collect_loss_terms,
    loss_term,
    whole,
)
from lightning_gpipe.core.faithful import is_recomputing
from lightning_gpipe.core.pipeline import GPipe, balance_by_memory, balance_by_time, plan, profile
from lightning_gpipe.core.plan import (
    LayerProfile,
    ModelProfile,
    Place,
    Plan,
    Schedule,
    balance_by_parameters,
)
from lightning_gpipe.core.run import Timeline
from lightning_gpipe.core.transport import OutOfStep, RankFailed
from lightning_gpipe.core.verify import LossParity, Parity, StepParity, verify, verify_step
from lightning_gpipe.foreign_trainers import registries
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
    "StepParity",
    "Timeline",
    "balance_by_memory",
    "balance_by_parameters",
    "balance_by_time",
    "collect_loss_terms",
    "is_recomputing",
    "loss_term",
    "plan",
    "profile",
    "verify",
    "verify_step",
    "whole",
]

# The second is the path of the class, as a configuration may have it; a Trainer takes no capitals.
for _registry in registries():
    for _name in ("gpipe", "lightning_gpipe.gpipestrategy"):
        if _name not in _registry:  # importlib.reload comes here twice
            _registry.register(_name, GPipeStrategy, description=GPipeStrategy.__doc__)
