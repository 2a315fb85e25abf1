"""Callbacks that watch a pipeline while it trains, and move its layers when that pays."""

from lightning_gpipe.callbacks.monitor import PipelineMonitor
from lightning_gpipe.callbacks.rebalance import Rebalance

__all__ = ["PipelineMonitor", "Rebalance"]
