"""What runs: stages with their layers, workers with their rows of a schedule, mini-batches.

A mini-batch enters at stage 0 in micro-batches and leaves as one node in the caller's graph; the
workers in between interpret the schedule and decide nothing.
"""

from lightning_gpipe.core.run.alone import pass_alone
from lightning_gpipe.core.run.asides import explain_second_backward
from lightning_gpipe.core.run.code import Code
from lightning_gpipe.core.run.coroutine import greenlets
from lightning_gpipe.core.run.engine import Engine
from lightning_gpipe.core.run.losses import LOSS_WEIGHT, Losses, loss_and_weight
from lightning_gpipe.core.run.observation import Observation, typical
from lightning_gpipe.core.run.stage import Stage
from lightning_gpipe.core.run.stage_pass import StagePass, in_layers
from lightning_gpipe.core.run.timeline import Span, Timeline
from lightning_gpipe.core.run.ways import Found, Threads, Ways, check_threads

__all__ = [
    "LOSS_WEIGHT",
    "Code",
    "Engine",
    "Found",
    "Losses",
    "Observation",
    "Span",
    "Stage",
    "StagePass",
    "Threads",
    "Timeline",
    "Ways",
    "check_threads",
    "explain_second_backward",
    "greenlets",
    "in_layers",
    "loss_and_weight",
    "pass_alone",
    "typical",
]
