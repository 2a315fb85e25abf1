"""Layers that fail on request, and ways to fail."""

import gc
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe.core.transport import local
from tests.support.models import Runs
from tests.support.waiting import NEVER, PATIENCE


def nothing() -> None:
    """Do nothing."""


class Spark(Runs):
    """A fault, and the call at which it comes; those of recomputations count."""

    __slots__ = ("at", "fault")

    def __init__(self) -> None:
        super().__init__()
        self.at: tuple[str, int] | None = None
        self.fault: Callable[[], None] = nothing


class Fuse(nn.Module):
    """Passes its input on, until it does a fault at one of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.spark = Spark()

    def light(self, at: tuple[str, int], fault: Callable[[], None]) -> None:
        """Do ``fault`` after so many calls from now of the forward or of the backward."""
        spark = self.spark
        spark.forward, spark.backward = [], []
        spark.at, spark.fault = at, fault

    def called(self, kind: str) -> None:
        spark = self.spark
        calls = spark.forward if kind == "forward" else spark.backward
        if (kind, len(calls)) == spark.at:
            fault, spark.at, spark.fault = spark.fault, None, nothing
            fault()
        calls.append(None)

    def forward(self, x: Tensor) -> Tensor:
        self.called("forward")
        return _Burn.apply(x, self)


class _Burn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fuse: Fuse) -> Tensor:
        ctx.fuse = fuse
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.fuse.called("backward")
        return gradients[0], None


class OwnError(Exception):
    """What only a layer of a test raises."""


def throw(error: BaseException) -> Callable[[], None]:
    """What raises ``error``."""

    def fault() -> None:
        raise error

    return fault


@contextmanager
def interruptible() -> Iterator[None]:
    """Makes Ctrl-C raise KeyboardInterrupt, which it does not in a shell's background process.

    Nor would it in the middle of garbage: Python drops what is raised while it ends an object.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        signal.signal(signal.SIGINT, before)


def interrupt_the_caller(work: Callable[[], None]) -> None:
    """As Ctrl-C does while the caller waits for this layer, which goes on with its work."""
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, signal.SIGINT)
    work()


class Busy:
    """Work that is not over before the test ends it, or has lost its patience.

    Attributes:
        begun: Is set when the work begins.
        over: Whether it has ended.
    """

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.over = False
        self._end = threading.Event()

    def __call__(self) -> None:
        self.begun.set()
        self._end.wait(PATIENCE)
        self.over = True

    def end(self) -> None:
        self._end.set()


def no_time_out(patch: pytest.MonkeyPatch) -> None:
    """Let a thread that nobody wakes wait for ever, and one that ends take its time."""
    patch.setattr(local, "POLL", NEVER)
    patch.setattr(local, "JOIN", PATIENCE)
