"""SIGKILL at a drawn moment: a call on the main thread, of a function or of C."""

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple


class Moment(NamedTuple):
    """A call on the main thread: which one of those made there."""

    where: str
    call: int


class Calls:
    """Counts the calls on this thread, and ends the process at one of them.

    Args:
        last: The call that is the last one; None to count only.

    Attributes:
        made: How many were made in all, and while a checkpoint was saved.
    """

    def __init__(self, last: Moment | None) -> None:
        self.made = {"anywhere": 0, "saving": 0}
        self._last = last
        self._saving = False

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event in ("call", "c_call"):
            self._count("anywhere")
            if self._saving:
                self._count("saving")

    def _count(self, where: str) -> None:
        self.made[where] += 1
        if self._last == (where, self.made[where]):
            os.kill(os.getpid(), signal.SIGKILL)

    def saving(self, save: Callable[..., None]) -> Callable[..., None]:
        """A function that saves, which is told."""

        def told(*args: Any, **kwargs: Any) -> None:
            self._saving = True
            save(*args, **kwargs)
            self._saving = False

        return told

    def during(self, run: Callable[[], None]) -> None:
        """Run with this at work."""
        sys.setprofile(self)
        try:
            run()
        finally:
            sys.setprofile(None)
