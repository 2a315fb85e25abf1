"""Refuses ``self.log`` within the layers of a pipeline.

A layer that refers to the LightningModule, or is one, may call its ``log``. In a pipeline it would
do so for each micro-batch instead of once for the batch, on a worker's thread, which Lightning's
collection of results is not made for, and once more for each recomputation.
"""

from __future__ import annotations

from typing import Any

import lightning as L

from lightning_gpipe.core.run import in_layers


class GuardedLogs:
    """The logs of a LightningModule and of those within it, while its layers are a pipeline."""

    def __init__(self) -> None:
        self._guarded: list[GuardedLog] = []

    def guard(self, root: L.LightningModule) -> None:
        """Refuse what layers log from now on."""
        found = [each for each in root.modules() if isinstance(each, L.LightningModule)]
        self._guarded = [GuardedLog(module) for module in found]
        for each in self._guarded:
            each.install()

    def release(self) -> None:
        """Refuse no longer."""
        for each in self._guarded:
            each.remove()
        self._guarded = []


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

    def install(self) -> None:
        """Refuse from now on."""
        self._module.__dict__["log"] = self

    def remove(self) -> None:
        """Refuse no longer."""
        if self._module.__dict__.get("log") is self:
            del self._module.__dict__["log"]

    def __reduce__(self) -> tuple[Any, ...]:
        # As for the forward that `install` replaces: a copy has the method of its class.
        return getattr, (self._module, "log")
