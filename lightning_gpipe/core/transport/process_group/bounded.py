"""A question that may never be answered.

A store of torch.distributed whose machine no network reaches any more does not answer, and none of
its timeouts applies to that. So another thread asks, which is left behind if it must be.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from typing import NoReturn, TypeVar

T = TypeVar("T")


def within(limit: timedelta, ask: Callable[[], T], unanswered: str) -> T:
    """What ``ask`` returns on another thread.

    Args:
        limit: How long to wait for it.
        ask: The question.
        unanswered: An error, for when it is not answered.

    Raises:
        RuntimeError: If it is not answered in time.
        BaseException: What ``ask`` raises.
    """
    answers: SimpleQueue[Callable[[], T]] = SimpleQueue()

    def answer() -> None:
        try:
            found = ask()
        except BaseException as error:
            answers.put(partial(_throw, error))
        else:
            answers.put(lambda: found)

    Thread(target=answer, name="gpipe-question", daemon=True).start()
    try:
        result = answers.get(timeout=limit.total_seconds())
    except Empty:
        raise RuntimeError(f"{unanswered} within {limit.total_seconds():g} s.") from None
    return result()


def _throw(error: BaseException) -> NoReturn:
    raise error
