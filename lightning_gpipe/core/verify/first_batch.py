"""Verifies a pipeline on its first training batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from lightning_gpipe.core.faithful import is_traced
from lightning_gpipe.core.pipeline import GPipe, Programs, Taken
from lightning_gpipe.core.plan import Program
from lightning_gpipe.core.verify.parity import Parity
from lightning_gpipe.core.verify.verification import verify, verify_call, verify_run
from lightning_gpipe.core.verify.whole import Whole


class EachVerifiedOnce:
    """Verifies the first run of each pipeline of a model, in training mode with gradients.

    Programs are verified with the whole call of the module whose forward they are made of, if it
    is called, and without where another one loops over its blocks.

    Args:
        found: What runs as a pipeline.
        on_result: Called with the result of each verification.
    """

    def __init__(self, found: Sequence[Taken], on_result: Callable[[Parity], None]) -> None:
        self._found = found
        self._on_result = on_result
        self._done: set[Taken] = set()
        owners = dict.fromkeys(taken.owner for taken in found if isinstance(taken, Programs))
        self._handles = {
            owner: owner.register_forward_pre_hook(self._before, with_kwargs=True)
            for owner in owners
        }
        for taken in found:
            taken.check = self._run

    def remove(self) -> None:
        """Verify no more."""
        for handle in self._handles.values():
            handle.remove()
        for taken in self._found:
            taken.check = None

    def _before(self, owner: nn.Module, args: Any, kwargs: Any) -> None:
        """Before a call of the module."""
        found = [taken for taken in self._found if isinstance(taken, Programs)]
        found = [taken for taken in found if taken.owner is owner and taken not in self._done]
        if not found or not _counts(owner) or is_traced((args, kwargs), owner.parameters()):
            return
        self._done.update(found)
        parity = verify_call(Whole(owner, found), owner.forward, args, kwargs)
        if parity is None:  # a call without them
            self._done.difference_update(found)
            return
        self._handles[owner].remove()
        self._on_result(parity)

    def _run(self, taken: Taken, program: Program | None, values: Any) -> None:
        """Before a run."""
        if taken not in self._done and _counts(taken.module):
            self._done.add(taken)
            self._on_result(verify_run(taken, program, values))


def _counts(module: nn.Module) -> bool:
    return module.training and torch.is_grad_enabled()


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
        wanted = self._pending and _counts(self._module)
        if wanted and not is_traced(input, self._pipeline.parameters()):
            self._pending = False
            self._on_result(verify(self._pipeline, input))
        return self._pipeline.forward(input)
