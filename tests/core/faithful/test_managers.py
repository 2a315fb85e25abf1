from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lightning_gpipe.core.faithful.managers import NOTHING, together


@contextmanager
def noted(log: list[str], name: str) -> Iterator[None]:
    log.append(f"enter {name}")
    try:
        yield
    finally:
        log.append(f"exit {name}")


def test_none_are_nothing() -> None:
    assert together([]) is NOTHING


def test_one_is_itself() -> None:
    manager = noted([], "a")

    assert together([manager]) is manager


def test_several_are_entered_in_order_and_left_in_reverse() -> None:
    log: list[str] = []

    with together([noted(log, "a"), noted(log, "b")]):
        log.append("within")

    assert log == ["enter a", "enter b", "within", "exit b", "exit a"]


def test_all_are_left_after_an_error() -> None:
    log: list[str] = []

    with pytest.raises(KeyError), together([noted(log, "a"), noted(log, "b")]):
        raise KeyError

    assert log[-2:] == ["exit b", "exit a"]
