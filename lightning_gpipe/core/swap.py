"""Lets an nn.Sequential run as a pipeline without ceasing to be that nn.Sequential.

To wrap the module in another one would change the names in its state dict, to replace it would lose
its class, its hooks and its other methods, and to hang the pipeline's threads on it would end
``copy.deepcopy(model)`` and ``torch.save(model)``. So the object stays, and only what it runs
changes: an instance attribute ``forward``, which a copy does not take along.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lightning_gpipe.core.parity import Parity, verify
from lightning_gpipe.core.pipeline import GPipe


def install(
    sequential: nn.Sequential,
    pipeline: GPipe,
    *,
    judge: Callable[[Parity], None] | None = None,
) -> None:
    """Let ``sequential`` run as ``pipeline`` until :func:`remove`.

    Args:
        sequential: The module whose layers the pipeline has.
        pipeline: The pipeline.
        judge: If given, the first input in training mode with gradients is verified before it
            runs, and this is called with what came of it.
    """
    piped = _Piped(sequential, pipeline, judge)
    sequential.forward = piped  # type: ignore[method-assign]  # that is it


def remove(sequential: nn.Sequential) -> None:
    """Let ``sequential`` run its layers by itself again."""
    sequential.__dict__.pop("forward", None)


class _Piped:
    """The forward of a module that runs as a pipeline."""

    def __init__(
        self,
        sequential: nn.Sequential,
        pipeline: GPipe,
        judge: Callable[[Parity], None] | None,
    ) -> None:
        self._sequential = sequential
        self._pipeline = pipeline
        self._judge = judge  # None once it has judged

    def __call__(self, input: Any) -> Any:
        if self._judge is not None and self._sequential.training and torch.is_grad_enabled():
            judge, self._judge = self._judge, None
            judge(verify(self._pipeline, input))
        # Hooks on all modules that there are see the user's modules, not ours.
        return self._pipeline.forward(input)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the module, pickled or deep, runs as the plain module that it is a copy of. When
        # this is called, the copy has no attributes yet, so it is its class that has a forward.
        return getattr, (self._sequential, "forward")
