"""What carries tensors between workers.

Workers run their rows without knowing where the others are. All they know is the action that needs
what they made: the output of stage j for micro-batch i goes to ``F(i, j+1)``, its input's gradient
to ``B(i, j-1)``. The caller stands at both ends, as the stage before the first and the one after
the last. A skip tensor goes straight to the action that pops it, past all stages between, and its
gradient straight back. How it gets there, through a queue in one process or over a network, is the
transport's business.

What travels is a value taken apart, or the gradients of its leaves. Its tensors belong to no graph;
whether they require a gradient is part of the value and travels with them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from lightning_gpipe.core.data import FlatTree
from lightning_gpipe.core.plan import Action
from lightning_gpipe.core.skip import Route


class Cancelled(BaseException):
    """Raised in a worker when the run it is part of has failed elsewhere."""


class Exchange(ABC):
    """The mail of one half of one mini-batch."""

    @abstractmethod
    def send(self, to: Action, value: FlatTree, skip: Route | None = None) -> None:
        """Hand over what ``to`` needs of its neighbour, or of a skip connection."""

    @abstractmethod
    def receive(self, at: Action, skip: Route | None = None) -> FlatTree:
        """Wait for what ``at`` needs of its neighbour, or of a skip connection, on its device.

        Raises:
            Cancelled: If the run was given up.
        """

    @abstractmethod
    def check(self) -> None:
        """Raise :class:`Cancelled` if the run was given up."""


class Transport(ABC):
    """A way to connect workers, and to run those that live in this process."""

    @abstractmethod
    def turn(self) -> AbstractContextManager[None]:
        """A ``with`` block in which no other thread uses the workers, nor a run that failed."""

    @abstractmethod
    def open(self) -> Exchange:
        """A new, empty exchange."""

    @abstractmethod
    def run(self, exchange: Exchange, jobs: Sequence[Callable[[], None]]) -> None:
        """Run this process's workers to their end, at the same time.

        Raises:
            BaseException: What the first of them to fail raised; the others are stopped.
        """

    @abstractmethod
    def close(self) -> None:
        """End what the transport started; it starts anew when used again."""
