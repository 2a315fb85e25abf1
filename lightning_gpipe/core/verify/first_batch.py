"""Verifies a pipeline on its first training batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lightning_gpipe.core.faithful import is_traced
from lightning_gpipe.core.pipeline import GPipe, Taken
from lightning_gpipe.core.plan import Program
from lightning_gpipe.core.verify.parity import Parity
from lightning_gpipe.core.verify.verification import verify, verify_run


class RunVerifiedOnce:
    """Verifies the first run of each pipeline of a model, in training mode with gradients.

    Args:
        on_result: Called with the result of each verification.
    """

    def __init__(self, on_result: Callable[[Parity], None]) -> None:
        self._on_result = on_result
        self._done: set[Taken] = set()

    def __call__(self, taken: Taken, program: Program | None, values: Any) -> None:
        if taken not in self._done and taken.module.training and torch.is_grad_enabled():
            self._done.add(taken)
            self._on_result(verify_run(taken, program, values))


class VerifiedOnce:
    """Runs a pipeline, and verifies it on its first input in training mode with gradients.

    Args:
        pipeline: The pipeline.
        module: The module that it replaces, whose training mode is read.
        on_result: Called with the result of the verification.
    """

    def __init__(
        self, pipeline: GPipe, module: nn.Module, on_result: Callable[[Parity], None]
    ) -> None:
        self._pipeline = pipeline
        self._module = module
        self._on_result = on_result
        self._pending = True

    def __call__(self, input: Any) -> Any:
        wanted = self._pending and self._module.training and torch.is_grad_enabled()
        if wanted and not is_traced(input, self._pipeline.parameters()):
            self._pending = False
            self._on_result(verify(self._pipeline, input))
        return self._pipeline.forward(input)
