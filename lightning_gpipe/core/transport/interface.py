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
from lightning_gpipe.core.programs import Route
from lightning_gpipe.core.schedules import Action, Schedule


class RunCancelled(BaseException):
    """Raised in a worker when the run it is part of has failed elsewhere."""


class OutputElsewhere(BaseException):
    """Raised where the caller's code calls the pipeline, if another process gets the output."""


class RankFailed(RuntimeError):
    """Raised when another process of the pipeline has failed, or is lost.

    The message names its rank and its stages, and its error, or says that nothing was heard of it
    for the time ``lost_after``. After an error the next step works if all processes go on; after a
    loss no step does.

    Attributes:
        ended: Whether nothing failed: the process has only come to its end.
    """

    ended = False


class OutOfStep(RuntimeError):
    """Raised when the processes of a pipeline do not do the same.

    The message says what each did, such as a training step and an evaluation, or what each waits
    for, when none of them will come.
    """


STEP = 2  # the only phase of a mini-batch with a loss for each micro-batch
BETWEEN = -1  # the phase of an exchange between two mini-batches
NO_RUN = -2  # the phase of a step of the caller that has run no mini-batch


TOLD = 2  # processes between the first stage and the last are told of a call of the caller's code


class Label(NamedTuple):
    """A phase of a mini-batch and its mode, the same in all processes."""

    pipeline: int = 0  # among those over these processes
    minibatch: int = 0  # a later one has a larger number
    phase: int = 0
    step: int = 0  # of the training
    grad: int = 0  # 1 with gradients
    microbatches: int = 0  # their number
    training: int = 0
    program: int = 0  # a checksum of the calls that the stages run
    state: int = 0  # a checksum of the states of the random generators
    at_last: int = 0  # not 0 if only the process of the last stage gets the outputs; or TOLD


class Exchange(ABC):
    """Sends and receives the values of one phase of one mini-batch.

    ``heard`` are the bits that other processes have signalled. ``cancelled`` is True if
    :meth:`check` raises; reading it before each action costs nothing.
    """

    phase: Schedule
    heard: int = 0
    cancelled: bool = False

    @abstractmethod
    def send(self, to: Action, value: FlatTree, skip: Route | None = None) -> None:
        """Send the value that ``to`` needs from the neighbouring stage or a skip connection."""

    def send_as_told(self, to: Action, value: FlatTree, skip: Route | None = None) -> None:
        """Send an input of the caller, from the process of the first stage only."""
        self.send(to, value, skip)

    def send_to_all(self, to: Action, value: FlatTree, route: Route) -> None:
        """Send a value to the callers of all processes, whichever of them get the results."""
        self.send(to, value, route)

    @abstractmethod
    def receive(self, at: Action, skip: Route | None = None) -> FlatTree:
        """Wait for the value that ``at`` needs, on its device; raise if the run ends without it."""

    def receive_end(self) -> None:
        """Wait until the phase has ended, also in a process that gets no result of it."""
        self.receive(self.phase.last_result)

    def check(self) -> None:
        if self.cancelled:
            raise RunCancelled

    def signal(self, bits: Callable[[], int]) -> None:  # noqa: B027 - most have nobody to tell
        """Send ``bits()`` to other processes with values of the last micro-batch, and those after.

        Bits that are set stay set.
        """

    def settle(self) -> None:  # noqa: B027 - most have nothing to wait for
        """Wait until the tensors that were sent may be changed."""


class Task(ABC):
    """The row of one worker in a phase; another thread performs it in a copy of its context."""

    row: Sequence[Action]
    variables: contextvars.Context

    @abstractmethod
    def session(self, *, joined: bool = False) -> AbstractContextManager[Any]:
        """Return a context manager around all actions, entered on the thread that performs them.

        ``joined`` is True within the session of another worker, which has set the thread's state.
        """

    @abstractmethod
    def perform(self, actions: Sequence[Action], *, at_once: bool = False) -> None:
        """Perform some actions of the row, one after another.

        With ``at_once``, they are all backwards of a stage, and nobody waits for one of them alone.
        """

    @abstractmethod
    def abandon(self) -> None:
        """Undo the changes of an unfinished task to the modules, and let it make no more."""


class Transport(ABC):
    """Connects workers, and runs those of this process."""

    @abstractmethod
    def exclusive(self) -> AbstractContextManager[None]:
        """Return a ``with`` block in which no other thread and no failed run uses the workers."""

    @abstractmethod
    def open(
        self, phase: Schedule, label: Label | None = None, awaited: Collection[Action] | None = None
    ) -> Exchange:
        """Return a new exchange for a phase; ``awaited`` are the caller's results, None for all."""

    @abstractmethod
    def run(self, exchange: Exchange, tasks: Sequence[Task], caller: Task | None = None) -> None:
        """Run a task for each worker, and the caller's; raise the error of the first to fail."""

    @property
    def begun(self) -> int:
        """The number of phases begun since a run failed, the same in all processes; or 0."""
        return 0

    @property
    def serial(self) -> int:
        """A number that changes when a phase begins or fails; the same in all processes."""
        return 0

    def tell(self, error: BaseException) -> None:  # noqa: B027 - most have nobody to tell
        """Tell other processes of a failure: their phase fails too, or the next that they begin."""

    def failure(self, within: float) -> RankFailed | OutOfStep | None:
        """Wait some seconds for a failure of another process since the last phase."""
        return None

    def on_lost_wait(self, act: Callable[[], None]) -> None:  # noqa: B027 - most wait for nobody
        """Call ``act``, on another thread, when waiting for a lost or failed process is in vain."""

    def explain(  # noqa: B027 - most have nobody to tell
        self, cause_of: Callable[[BaseException], BaseException]
    ) -> None:
        """Tell others of an error's cause in its place; ``cause_of``: a living object's method."""

    @abstractmethod
    def inline(self) -> Transport:
        """Return a transport between the same workers that runs them on the calling thread."""

    @abstractmethod
    def close(self) -> None:
        """End the threads that the transport started; using it again starts new ones."""
