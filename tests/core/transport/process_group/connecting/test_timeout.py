"""Questions that are answered, that fail, and that are never answered."""

from datetime import timedelta
from threading import Event

import pytest

from lightning_gpipe.core.transport import call_with_timeout
from tests.support.faults import OwnError, throw
from tests.support.waiting import PATIENCE

LONG = timedelta(seconds=PATIENCE)


def test_answer() -> None:
    assert call_with_timeout(LONG, lambda: 3, "nobody answered") == 3


def test_error() -> None:
    with pytest.raises(OwnError):
        call_with_timeout(LONG, throw(OwnError("asked")), "nobody answered")


def test_no_answer() -> None:
    never = Event()

    with pytest.raises(RuntimeError, match="nobody answered within 0.01 s"):
        call_with_timeout(timedelta(seconds=0.01), lambda: never.wait(PATIENCE), "nobody answered")

    never.set()
