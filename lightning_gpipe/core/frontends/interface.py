"""The interface between the facade and what makes programs of a module's forward.

A front-end knows the user's module, and neither the facade nor the engine. It tells what can be
cut, makes the partitions, and installs itself: from then on a call of the user's model makes a
program of the call and has the facade run it.

The facade uses a front-end in this order::

    frontend = Loop(model, "model.layers")              # checks what can be checked without input
    partitions = frontend.partitions([8, 8])            # the facade moves them to their devices
    frontend.install(run)                               # calls of model run as a pipeline
    ...
    with frontend.plain(): model(batch)                 # as without a pipeline
    ...
    frontend.remove()                                   # the model is as it was
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from lightning_gpipe.core.plan import Partition, Program


class RunProgram(Protocol):
    """Runs a program in micro-batches; the facade's."""

    def __call__(
        self, program: Program, values: Sequence[Any], *, chunks: int | None = None
    ) -> list[Any]:
        """Run a program.

        Args:
            program: What to run, on as many stages as there are partitions.
            values: The value of each of the program's inputs, in order: pytrees, whose tensors are
                cut by rows unless they are marked by :func:`~lightning_gpipe.whole`.
            chunks: The number of micro-batches; None takes that of the facade.

        Returns:
            The value of each of the program's outputs, in order, merged over the micro-batches.
        """


class Processes(Protocol):
    """The processes that own the stages; the facade's.

    All of them run the user's forward, on the same values. So they make the same program of it, as
    long as each knows what only those find out that have the values of a stage.
    """

    @property
    def outside(self) -> torch.device:
        """The device of what is around the stages in this process."""

    def owns(self, j: int) -> bool:
        """Whether stage ``j`` is in this process."""

    def tell(self, error: BaseException) -> None:
        """Tell the others of an error, which the user's code may catch: none of them waits then."""

    def everywhere(self, j: int, compute: Callable[[], Any]) -> Any:
        """What ``compute`` returns in the process of stage ``j``, in all processes.

        All of them call this, in the same order. Those that do not own the stage do not compute.

        Args:
            j: The stage.
            compute: Returns a pytree. What it raises is raised in its process; the others raise
                that it has failed.
        """


class Frontend(ABC):
    """Makes programs of what the forward of a module does."""

    @property
    @abstractmethod
    def owner(self) -> nn.Module:
        """The module whose forward it makes programs of."""

    @property
    @abstractmethod
    def units(self) -> Sequence[str]:
        """The names of what is cut, in order, from the whole model, such as ``layers.3``.

        A balance counts them. A name may appear several times.
        """

    @abstractmethod
    def costs(self) -> list[int]:
        """The number of parameters of each unit; a shared one counts for the first that has it."""

    @abstractmethod
    def partitions(self, balance: Sequence[int]) -> list[Partition]:
        """Cut into stages: from now on programs have as many.

        Args:
            balance: The number of units in each stage; adds up to their number.

        Raises:
            TypeError, ValueError: If it cannot be cut there.
        """

    @abstractmethod
    def install(self, run: RunProgram, processes: Processes | None = None) -> None:
        """Make calls of the model run as a pipeline.

        Args:
            run: Runs the program of a call.
            processes: Those that own the stages, if this one does not own all of them.

        Raises:
            RuntimeError: If the model runs as a pipeline already.
        """

    @abstractmethod
    def remove(self) -> None:
        """Make the model as it was before :meth:`install`; does nothing a second time."""

    @abstractmethod
    def plain(self) -> AbstractContextManager[None]:
        """A ``with`` block in which calls of the model run as if nothing was installed."""
