"""The steps of the user's code in the processes of one pipeline, which run mini-batches together.

All of them call the pipeline in the same steps. One that runs no mini-batch in a step in which the
others run one would let them wait for it, and be ahead of them from then on. So a step without one
is compared with what the others did; one with a mini-batch was compared as it ran.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L

from lightning_gpipe.core.pipeline import GPipe


class InStep:
    """Keeps the steps of this process in step with those of the others.

    Args:
        module: The LightningModule.
        pipeline: The pipeline in it.
    """

    def __init__(self, module: L.LightningModule, pipeline: GPipe) -> None:
        self._module = module
        self._pipeline = pipeline

    def training(self, step: Callable[[], Any]) -> Any:
        """Run a training step.

        Raises:
            OutOfStep: If it ran no mini-batch, and another process did.
        """
        module, engine = self._module, self._pipeline.engine
        self._pipeline.step = module.global_step
        before = engine.serial
        result = step()
        if result is not None or not module.automatic_optimization:  # else Lightning refuses it
            engine.check_run(since=before)
        return result

    def evaluation(self, step: Callable[[], Any]) -> Any:
        """Run a step of an evaluation.

        Raises:
            OutOfStep: If it ran no mini-batch, and another process did.
        """
        engine = self._pipeline.engine
        before = engine.serial
        result = step()
        engine.check_run(since=before)
        return result
