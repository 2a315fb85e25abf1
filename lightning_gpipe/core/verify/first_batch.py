"""Verifies pipelines on the first training batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from lightning_gpipe.core.faithful import is_traced
from lightning_gpipe.core.pipeline import PipedModule
from lightning_gpipe.core.programs import Program
from lightning_gpipe.core.verify.own_forward import WholeCall
from lightning_gpipe.core.verify.parity import Parity
from lightning_gpipe.core.verify.verification import verify_call, verify_run


class FirstBatchVerifier:
    """Verifies the first run of each pipeline of a model, in training mode with gradients.

    A module whose forward makes the programs is verified with its whole call, if it is called; it
    is not where another module loops over its blocks.

    Args:
        piped: The modules that run as pipelines.
        on_result: Called with the result of each verification.
    """

    def __init__(self, piped: Sequence[PipedModule], on_result: Callable[[Parity], None]) -> None:
        self._piped = piped
        self._on_result = on_result
        self._done: set[PipedModule] = set()
        owners = dict.fromkeys(
            taken.frontend.owner for taken in piped if not taken.frontend.takes_batch
        )
        self._handles = {
            owner: owner.register_forward_pre_hook(self._before_call, with_kwargs=True)
            for owner in owners
        }
        for taken in piped:
            taken.check = self._before_run

    def remove(self) -> None:
        """Verify no more."""
        for handle in self._handles.values():
            handle.remove()
        for taken in self._piped:
            taken.check = None

    def _before_call(self, owner: nn.Module, args: Any, kwargs: Any) -> None:
        piped = [
            taken
            for taken in self._piped
            if taken.frontend.owner is owner and taken not in self._done
        ]
        if not piped or not _trains(owner) or is_traced((args, kwargs), owner.parameters()):
            return
        self._done.update(piped)
        parity = verify_call(WholeCall(owner, piped, owner.forward, args, kwargs))
        if parity is None:  # a call without them
            self._done.difference_update(piped)
            return
        self._handles[owner].remove()
        self._on_result(parity)

    def _before_run(self, taken: PipedModule, program: Program, values: Sequence[Any]) -> None:
        if taken not in self._done and _trains(taken.module):
            self._done.add(taken)
            self._on_result(verify_run(taken, program, values))


def _trains(module: nn.Module) -> bool:
    return module.training and torch.is_grad_enabled()
