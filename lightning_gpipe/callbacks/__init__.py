"""Callbacks for a Trainer with a pipeline, which users add to it.

PipelineMonitor logs how busy the devices are; Rebalance moves layers between them when that pays;
StepInBackward steps the parameters of each stage while others still run backward.
"""

from lightning_gpipe.callbacks.monitor import PipelineMonitor
from lightning_gpipe.callbacks.rebalance import Rebalance
from lightning_gpipe.callbacks.step_in_backward import StepInBackward

__all__ = ["PipelineMonitor", "Rebalance", "StepInBackward"]
