"""The interface between the facade and the front-ends, which make programs of forwards.

A front-end knows the user's module, and neither the engine nor the facade, which uses it so::

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
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, Protocol

from torch import nn

from lightning_gpipe.core.faithful import NOTHING, Manager
from lightning_gpipe.core.frontends.install import InstalledForward, own_forward_of
from lightning_gpipe.core.layout import Layout, Partition
from lightning_gpipe.core.programs import Program


class RunProgram(Protocol):
    """Runs a program in micro-batches; the facade's."""

    def __call__(
        self, program: Program, values: Sequence[Any], *, chunks: int | None = None
    ) -> list[Any]:
        """Run a program; return its outputs, in order, merged over the micro-batches.

        Tensors in ``values``, which are pytrees, are cut by rows unless they are marked by
        :func:`~lightning_gpipe.whole`. ``chunks`` is by default that of the facade.
        """


class OwnerProcesses(Protocol):
    """The processes that own the stages; all run the user's forward on the same values."""

    @property
    def layout(self) -> Layout:
        """The layout, with the owner of each stage."""

    def tell(self, error: BaseException) -> None:
        """Send an error to the others, so that none waits; the user's code may catch it here."""

    @property
    def undisturbed(self) -> AbstractContextManager[Any]:
        """A ``with`` block for code that looks at the modules: no worker uses them meanwhile."""

    def busy(self, j: int) -> bool:
        """Return True if workers may use modules of stage ``j`` while the calling code runs."""

    def rehearse(self, j: int, compute: Callable[[], Any]) -> Any:
        """Compute a pytree in the process of stage ``j``, and return it in all processes.

        All of them must call this, in the same order; all raise if ``compute`` does. No worker uses
        the modules meanwhile, and the layers have the values of all their parameters.
        """


class Frontend(ABC):
    """Makes programs of the calls in the forward of the module at ``path`` in the user's model.

    ``takes_batch`` is True if the layers get the batch as the user made it, so that any way to
    split batches serves. ``variables`` are the context variables that it sets during a program.
    """

    takes_batch = False
    variables: Collection[ContextVar[Any]] = ()

    def __init__(self, model: nn.Module, path: str = "") -> None:
        self._model = model
        self._module = model.get_submodule(path)
        self._prefix = f"{path}." if path else ""
        self._installed: InstalledForward | None = None
        self._first, self._n = 0, 0

    def place(self, first: int, n: int) -> None:
        """Let its stages be those from ``first`` on in a pipeline of ``n``, for its next cut."""
        self._first, self._n = first, n

    def _placed(self, partitions: Iterable[Partition]) -> list[Partition]:
        return [replace(each, index=self._first + each.index) for each in partitions]

    @property
    def owner(self) -> nn.Module:
        return self._module

    @property
    def own(self) -> Sequence[nn.Parameter]:
        """The parameters of the module that no layer has."""
        return []

    @property
    def program(self) -> Program | None:
        """The program of all calls; None if it depends on the call."""
        return None

    def running(self) -> Manager:
        """A ``with`` block in which the program of a call may run."""
        return NOTHING

    def call(self, run: RunProgram, /, *args: Any, **kwargs: Any) -> Any:
        """Call the user's model, in which this was installed.

        ``run`` is for a front-end that is not installed in the model but is called by the facade
        alone: an attribute would make a cycle, which keeps a facade that is dropped.
        """
        return self._model.forward(*args, **kwargs)

    @property
    @abstractmethod
    def units(self) -> Sequence[str]:
        """The names of the units that a balance counts, in order: paths in the whole model."""

    @property
    @abstractmethod
    def unit_modules(self) -> Iterable[nn.Module]:
        """The modules of each unit, as one."""

    def in_units(self, balance: Sequence[int]) -> Sequence[int]:
        """Return a user's balance as one that counts :attr:`units`."""
        return balance

    @abstractmethod
    def partitions(self, balance: Sequence[int]) -> list[Partition]:
        """Cut the module into stages with these numbers of units, for all later programs.

        Raises a TypeError or a ValueError if it cannot be cut there.
        """

    @abstractmethod
    def install(self, run: RunProgram, processes: OwnerProcesses | None = None) -> None:
        """Make calls of the model run as a pipeline, whose stages ``processes`` own, if several.

        Raises a RuntimeError if the model runs as a pipeline already.
        """

    def remove(self) -> None:
        """Restore the model from before :meth:`install`; does nothing a second time."""
        if self._installed is not None:
            self._installed.remove()

    def plain(self) -> AbstractContextManager[None]:
        """Return a ``with`` block in which calls of the model run without the pipeline."""
        return own_forward_of(self._module)
