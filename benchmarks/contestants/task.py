"""What all contestants do: one step of one model on one mini-batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from benchmarks.harness import Contestant

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Task:
    """A model, a mini-batch and a loss.

    Attributes:
        module: The layers; each contestant trains a copy of its own.
        x: The input.
        target: What the loss compares the output with.
        loss: Of the output and the target, a mean over the whole mini-batch.
    """

    module: nn.Sequential
    x: Tensor
    target: Tensor
    loss: Loss

    def copy_of_module(self) -> nn.Sequential:
        """The layers, with the same values."""
        return copy.deepcopy(self.module)

    def contestant(
        self,
        name: str,
        forward: Callable[[Tensor], Tensor],
        parameters: Sequence[nn.Parameter],
        *,
        threads: int | None = None,
    ) -> Contestant:
        """Who steps by ``forward``, the loss and ``backward()``, from gradients of None."""

        def step() -> None:
            for parameter in parameters:
                parameter.grad = None
            self.loss(forward(self.x), self.target).backward()

        return stepping(name, step, parameters, threads=threads)


def stepping(
    name: str,
    step: Callable[[], object],
    parameters: Sequence[nn.Parameter],
    *,
    threads: int | None = None,
) -> Contestant:
    """Who leaves its gradients in ``parameters``."""

    def gradients() -> list[Tensor]:
        step()
        return [each.grad for each in parameters if each.grad is not None]

    def clear() -> None:
        for each in parameters:
            each.grad = None

    return Contestant(name, step, gradients, threads, clear=clear)
