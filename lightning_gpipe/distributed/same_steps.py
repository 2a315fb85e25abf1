"""Compares the steps of the user's code in the processes of one pipeline.

All processes call the pipeline in the same steps. If one runs no mini-batch in a step in which the
others run one, they wait for it, and it is one step ahead from then on. So a step without a
mini-batch is compared with that of the others; mini-batches are compared as they run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L

from lightning_gpipe.core.pipeline import GPipe


class SameSteps:
    """Runs steps, and compares those without a mini-batch with the other processes.

    Args:
        module: The LightningModule.
        pipeline: The pipeline in it.

    Raises:
        OutOfStep: If a step ran no mini-batch, and another process did.
    """

    def __init__(self, module: L.LightningModule, pipeline: GPipe) -> None:
        self._module = module
        self._pipeline = pipeline

    def training(self, step: Callable[[], Any]) -> Any:
        """Run a training step."""
        module, engine = self._module, self._pipeline.engine
        self._pipeline.step = module.global_step
        before = engine.serial
        result = step()
        if result is not None or not module.automatic_optimization:  # else Lightning refuses it
            engine.check_run(since=before)
        return result

    def evaluation(self, step: Callable[[], Any]) -> Any:
        """Run an evaluation step."""
        engine = self._pipeline.engine
        before = engine.serial
        result = step()
        engine.check_run(since=before)
        return result
