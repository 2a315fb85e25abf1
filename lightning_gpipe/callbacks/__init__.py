"""Callbacks for a Trainer with a pipeline, which users add to it.

PipelineMonitor logs how busy the devices are; Rebalance moves layers between them when that pays.
"""

from lightning_gpipe.callbacks.monitor import PipelineMonitor
from lightning_gpipe.callbacks.rebalance import Rebalance

__all__ = ["PipelineMonitor", "Rebalance"]
