"""Runs a blocking call with a timeout.

When no network reaches the machine of a torch.distributed store any more, the store does not
answer, and none of its timeouts applies. So another thread calls it, and is abandoned if need be.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from datetime import timedelta
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


def call_with_timeout(timeout: timedelta, function: Callable[[], T], message: str) -> T:
    """Call ``function`` on another thread and return its result, or raise its error.

    Args:
        timeout: How long to wait for the result.
        function: The function.
        message: The beginning of the error after that time.

    Raises:
        RuntimeError: If the function does not return in time.
    """
    outcome: Future[T] = Future()

    def call() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:
            outcome.set_exception(error)

    Thread(target=call, name="gpipe-question", daemon=True).start()
    seconds = timeout.total_seconds()
    if not wait([outcome], seconds).done:
        raise RuntimeError(f"{message} within {seconds:g} s.")
    return outcome.result()
