"""What of a LightningModule runs as a pipeline, from setup to teardown.

An nn.Sequential becomes a pipeline of its own that is installed in its place. Anything else is
piped within the whole LightningModule, whose forward and steps call it as before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lightning_gpipe.core.frontends import (
    Installed,
    candidates,
    check_awaited,
    check_free,
    install,
    place_around,
)
from lightning_gpipe.core.pipeline import GPipe, Layers, Programs, Taken
from lightning_gpipe.core.plan import check_outside, shared_with_outside
from lightning_gpipe.core.verify import Parity, ProgramVerifiedOnce, VerifiedOnce


class Piped:
    """The pipeline in a LightningModule.

    Args:
        taken: What runs as a pipeline.
        balance: The number of its units in each stage.
        devices: One per worker; what is around the pipeline is on the last.
        on_result: Called with the result of a verification on the first batch; None for none.
        options: Other arguments of :class:`~lightning_gpipe.GPipe`.

    Attributes:
        taken: As given.
        pipeline: The pipeline.
    """

    def __init__(
        self,
        taken: Taken,
        balance: Sequence[int],
        devices: Sequence[torch.device],
        on_result: Callable[[Parity], None] | None = None,
        **options: Any,
    ) -> None:
        self.taken = taken
        self._device = devices[-1]
        self._installed: Installed | None = None
        if not isinstance(taken, Layers):
            self.pipeline = GPipe(taken.root, balance, module=taken, devices=devices, **options)
            if on_result is not None and isinstance(taken, Programs):
                taken.check = ProgramVerifiedOnce(taken.module, on_result)
            return
        root, module = taken.root, taken.module
        check_awaited(root)
        check_free(module, taken.name)
        self.pipeline = GPipe(module, balance, devices=devices, **options)
        check_outside(root, module, self.pipeline.layout, self._device)
        self.pipeline.share(shared_with_outside(root, module), self._device)
        run = self.pipeline.forward
        if on_result is not None:
            run = VerifiedOnce(self.pipeline, module, on_result=on_result)
        self._installed = install(module, run, taken.name)

    @property
    def runs(self) -> int:
        """How often the pipeline ran."""
        return self.taken.runs if self._installed is None else self._installed.runs

    def place_around(self) -> None:
        """Move what is around the pipeline to the last device."""
        if self._installed is not None:  # in any other case GPipe has done so
            place_around(self.taken.root, {self.taken.module}, self._device)

    def remove(self) -> None:
        """Let the LightningModule run as without a pipeline, and end the worker threads."""
        if self._installed is None:
            self.pipeline.release()
        else:
            self._installed.remove()
        self.pipeline.close()

    def __str__(self) -> str:
        """What was taken, how it was cut, over what, and what else could have been."""
        others = [path for path in candidates(self.taken.root) if path != self.taken.path]
        beside = f"; not piped: {', '.join(map(repr, others))}" if others else ""
        kind = type(self.taken.module).__name__
        stages = ", ".join(f"{stage.partition} on {stage.device}" for stage in self.pipeline.stages)
        return f"GPipe runs {self.taken.name} ({kind}) as a pipeline: {stages}{beside}."
