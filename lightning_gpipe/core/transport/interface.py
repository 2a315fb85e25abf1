"""The interface between workers and the transport that connects and runs them.

Workers do not know where the others run. They address a value to the action that needs it: the
output of stage j for micro-batch i is sent to ``F(i, j+1)``, the gradient of its input to
``B(i, j-1)``. The caller is addressed as the stage before the first and the one after the last. A
skip tensor is sent directly to the action on the stage that pops it, and its gradient directly
back.

A value is sent as a flattened tree, or as the gradients of its leaves. Its tensors are detached;
their requires_grad is part of the value and is sent with it.
"""

from __future__ import annotations

import contextvars
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from lightning_gpipe.core.data import FlatTree
from lightning_gpipe.core.plan import Action, Route, Schedule


class Cancelled(BaseException):
    """Raised in a worker when the run it is part of has failed elsewhere."""


class RankFailed(RuntimeError):
    """Another process of the pipeline has failed, or is lost.

    It says which one, by its rank and its stages, and how that is known: the error that it raised,
    or that nothing was heard of it for the time ``lost_after``. After an error the next step works
    if all processes go on; after a loss none does.
    """


class OutOfStep(RuntimeError):
    """The processes of a pipeline do not do the same.

    They run different mini-batches, or one trains and another evaluates, or they have different
    random numbers: it says what each of two processes did.
    """


BETWEEN = -1  # the phase of what is asked between two mini-batches
NO_RUN = -2  # that of a step of the caller that has run no mini-batch


class Label(NamedTuple):
    """Which phase of which mini-batch it is, and in which mode; the same in all processes.

    Attributes:
        pipeline: Which of the pipelines over these processes.
        minibatch: The number of the mini-batch; a later one has a larger number.
        phase: The phase of its schedule.
        step: That of the training.
        grad: Whether with gradients.
        microbatches: Their number.
        training: How many modules are in training mode, above 32 bits that differ where others are.
        program: Differs where what the stages run does.
        state: Differs where the generators of random numbers do.
    """

    pipeline: int = 0
    minibatch: int = 0
    phase: int = 0
    step: int = 0
    grad: int = 0
    microbatches: int = 0
    training: int = 0
    program: int = 0
    state: int = 0


class Exchange(ABC):
    """Sends and receives the values of one phase of one mini-batch.

    Attributes:
        phase: The phase.
        heard: The bits that other processes have signalled in it.
        cancelled: Whether :meth:`check` raises: to be read before each action, at no cost.
    """

    phase: Schedule
    heard: int = 0
    cancelled: bool = False

    @abstractmethod
    def send(self, to: Action, value: FlatTree, skip: Route | None = None) -> None:
        """Send what ``to`` needs from the neighbouring stage, or from a skip connection."""

    @abstractmethod
    def receive(self, at: Action, skip: Route | None = None) -> FlatTree:
        """Wait for what ``at`` needs from the neighbouring stage, or from a skip connection.

        Returns:
            The value, on the device of ``at``.

        Raises:
            Cancelled: If the run was cancelled.
            RuntimeError: If the run ended without sending it.
        """

    @abstractmethod
    def check(self) -> None:
        """Raise :class:`Cancelled` if the run was cancelled."""

    def signal(self, bits: Callable[[], int]) -> None:  # noqa: B027 - most have nobody to tell
        """Tell other processes ``bits()`` with each value; those that are set stay set."""

    def settle(self) -> None:  # noqa: B027 - most have nothing to wait for
        """Wait until what was sent may be changed."""


class Task(ABC):
    """What one worker does in a phase, and the context that it needs."""

    @property
    @abstractmethod
    def row(self) -> Sequence[Action]:
        """The actions, in order."""

    @property
    @abstractmethod
    def variables(self) -> contextvars.Context:
        """Python's context variables; another thread performs the task in a copy of them."""

    @abstractmethod
    def session(self, *, joined: bool = False) -> AbstractContextManager[Any]:
        """A context manager around all actions, entered on the thread that performs them.

        Args:
            joined: Whether this is in the session of another worker of the run, which has given
                the thread its state.
        """

    @abstractmethod
    def perform(self, actions: Sequence[Action]) -> None:
        """Perform some actions of the row, one after another."""

    @abstractmethod
    def abandon(self) -> None:
        """Undo what a task that has not ended changed in the modules, and let it change no more."""


class Transport(ABC):
    """A way to connect workers, and to run those that it owns."""

    @abstractmethod
    def exclusive(self) -> AbstractContextManager[None]:
        """A ``with`` block in which neither another thread nor a failed run uses the workers."""

    @abstractmethod
    def open(
        self,
        phase: Schedule,
        label: Label | None = None,
        awaited: Collection[Action] | None = None,
    ) -> Exchange:
        """A new, empty exchange for a phase of a schedule.

        Args:
            phase: The phase.
            label: Which it is; needed where there are several processes.
            awaited: For which results the caller waits; None for all.
        """

    @abstractmethod
    def run(self, exchange: Exchange, tasks: Sequence[Task], caller: Task | None = None) -> None:
        """Run the workers to the end of their tasks, of which there is one for each, in order.

        Args:
            exchange: That of the phase.
            tasks: The tasks.
            caller: What the calling thread does meanwhile, if the phase has a row for it.

        Raises:
            BaseException: What the first worker to fail raised; the others are stopped.
        """

    @property
    def begun(self) -> int:
        """How many phases were begun since a run failed, the same in all processes; or 0."""
        return 0

    @property
    def serial(self) -> int:
        """Another number once a phase was begun, or has failed; the same in all processes."""
        return 0

    def tell(self, error: BaseException) -> None:  # noqa: B027 - most have nobody to tell
        """Tell other processes that this one has failed, in a phase or between two.

        Where they are in a phase, or begin the next one, that fails too.
        """

    def failure(self, within: float) -> RankFailed | None:
        """How another process has failed since the last phase, if one has.

        Args:
            within: How many seconds to wait until that is known.
        """
        return None

    def when_in_vain(self, act: Callable[[], None]) -> None:  # noqa: B027 - most wait for nobody
        """Call ``act``, on another thread, when it is in vain to wait for another process.

        It is lost; or it has failed, and this one does not heed that, since it waits elsewhere.
        """

    @abstractmethod
    def inline(self) -> Transport:
        """A transport between the same workers that runs all of them on the calling thread."""

    @abstractmethod
    def close(self) -> None:
        """End what the transport started, such as threads; using it again starts new ones."""
