"""What a worker may ask of a transport, and what a transport may ask of a worker.

Workers run their rows without knowing where the others are. All they know is the action that needs
what they made: the output of stage j for micro-batch i goes to ``F(i, j+1)``, its input's gradient
to ``B(i, j-1)``. The caller stands at both ends, as the stage before the first and the one after
the last. A skip tensor goes straight to the action that pops it, past all stages between, and its
gradient straight back.

What travels is a value taken apart, or the gradients of its leaves. Its tensors belong to no graph;
whether they require a gradient is part of the value and travels with them.
"""

from __future__ import annotations

import contextvars
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from lightning_gpipe.core.data import FlatTree
from lightning_gpipe.core.plan import Action, Route, Schedule


class Cancelled(BaseException):
    """Raised in a worker when the run it is part of has failed elsewhere."""


class Exchange(ABC):
    """The mail of one phase of one mini-batch."""

    @abstractmethod
    def send(self, to: Action, value: FlatTree, skip: Route | None = None) -> None:
        """Hand over what ``to`` needs of its neighbour, or of a skip connection."""

    @abstractmethod
    def receive(self, at: Action, skip: Route | None = None) -> FlatTree:
        """Wait for what ``at`` needs of its neighbour, or of a skip connection, on its device.

        Raises:
            Cancelled: If the run was given up.
            RuntimeError: If nothing can come any more.
        """

    @abstractmethod
    def check(self) -> None:
        """Raise :class:`Cancelled` if the run was given up."""


class Task(ABC):
    """What one worker does in a phase, and what must hold while it does."""

    @property
    @abstractmethod
    def row(self) -> Sequence[Action]:
        """The actions, in order."""

    @property
    @abstractmethod
    def variables(self) -> contextvars.Context:
        """Python's context variables, to run in a copy of them where it is another thread."""

    @abstractmethod
    def session(self) -> AbstractContextManager[Any]:
        """What to enter around all actions, on the thread that performs them."""

    @abstractmethod
    def perform(self, actions: Sequence[Action]) -> None:
        """Perform some actions of the row, one right after another."""


class Transport(ABC):
    """A way to connect workers, and to run those that it owns."""

    @abstractmethod
    def exclusive(self) -> AbstractContextManager[None]:
        """A ``with`` block in which no other thread uses the workers, nor a run that failed."""

    @abstractmethod
    def open(self, phase: Schedule) -> Exchange:
        """A new, empty exchange for a phase of a schedule."""

    @abstractmethod
    def run(self, exchange: Exchange, tasks: Sequence[Task]) -> None:
        """Run the workers to the end of their tasks, one for each worker in order.

        Raises:
            BaseException: What the first of them to fail raised; the others are stopped.
        """

    @abstractmethod
    def inline(self) -> Transport:
        """A transport between the same workers that runs all of them on the calling thread."""

    @abstractmethod
    def close(self) -> None:
        """End what the transport started; it starts anew when used again."""
