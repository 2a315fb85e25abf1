"""Refuses ``self.log`` within the layers of a pipeline.

A layer that refers to the LightningModule, or is one, may call its ``log``. In a pipeline it would
do so for each micro-batch instead of once for the batch, on a worker's thread, which Lightning's
collection of results is not made for, and once more for each recomputation.
"""

from __future__ import annotations

from typing import Any

import lightning as L

from lightning_gpipe.core.run import in_layers
from lightning_gpipe.strategy.adapters.replaced import ReplacedAttributes


def guard_logs(root: L.LightningModule, replaced: ReplacedAttributes) -> None:
    """Refuse what layers log with a LightningModule, or with one within it."""
    for module in root.modules():
        if isinstance(module, L.LightningModule):
            replaced.set(module, "log", GuardedLog(module))


class GuardedLog:
    """Stands in for the ``log`` of a LightningModule, as an attribute of that object.

    Args:
        module: The LightningModule.
    """

    def __init__(self, module: L.LightningModule) -> None:
        self._module = module
        self._log = module.log

    def __call__(self, name: str, *args: Any, **kwargs: Any) -> None:
        if in_layers():
            raise RuntimeError(
                f"a layer of the pipeline must not call log: got log({name!r}) of "
                f"{type(self._module).__name__}, which would log each micro-batch, and again when "
                "it is recomputed. Return the value from the layers, and log it in training_step."
            )
        self._log(name, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._module, "log")  # a copy has the method of its class
