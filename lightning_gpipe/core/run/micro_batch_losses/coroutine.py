"""The caller's code for one micro-batch, suspended where it calls the pipeline.

The code must run for a later micro-batch before it can go on for an earlier one. A thread for each
would do that, but a profiler, a counter of operations, autocast and Ctrl-C all belong to the
caller's thread. So each is a greenlet on that thread: a stack of its own, to which the thread
switches in about a microsecond, and on which any Python code can be suspended. Thread-local state,
such as grad mode, is not switched with it, so the code must be suspended in the state in which it
began.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib import import_module
from typing import Any

from lightning_gpipe.core.transport import RunCancelled


@cache
def greenlets() -> Any:
    """Return the module greenlet, imported only when it is needed."""
    try:
        return import_module("greenlet")
    except ModuleNotFoundError as error:
        if error.name != "greenlet":
            raise
        raise ModuleNotFoundError(
            "schedules with a loss for each micro-batch need the package greenlet: got none. "
            "Run pip install greenlet, or write schedule='fill_drain'.",
            name="greenlet",
        ) from None


class Coroutine:
    """Runs a function on a stack of its own; its errors are raised where it was resumed."""

    def __init__(self, function: Callable[[], Any], variables: contextvars.Context) -> None:
        self._function: Callable[[], Any] | None = function
        self._module = greenlets()
        self._greenlet = self._module.greenlet(self._run)
        self._greenlet.gr_context = variables

    @property
    def ended(self) -> bool:
        return bool(self._greenlet.dead)

    @property
    def current(self) -> bool:
        return self._module.getcurrent() is self._greenlet

    def resume(self, value: Any = None) -> Any:
        """Run it until it is suspended again or ends; return the value of that, or its result."""
        return self._greenlet.switch(value)

    def suspend(self, value: Any) -> Any:
        """Return to the code that resumed it; to be called in it."""
        return self._greenlet.parent.switch(value)

    def close(self) -> None:
        """End it for good where it is suspended; its ``finally`` blocks run, and may raise."""
        if not self._greenlet.dead:
            with suppress(RunCancelled):
                self._greenlet.throw(RunCancelled)

    def _run(self, _: Any) -> Any:
        function, self._function = self._function, None
        assert function is not None, "it begins once, and not after it was closed"
        return function()
