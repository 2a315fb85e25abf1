from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lightning_gpipe.core.faithful.managers import NOTHING, Bracket, setting, together


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


def test_the_end_of_a_bracket_gets_what_its_beginning_returned() -> None:
    log: list[str] = []

    with Bracket(lambda: "begun", log.append):
        assert not log

    assert log == ["begun"]


def test_a_setting_has_its_former_value_after_an_error() -> None:
    values = ["before"]

    with pytest.raises(KeyError), setting(lambda: values[-1], values.append, "within"):
        raise KeyError

    assert values == ["before", "within", "before"]


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


class Left:
    """Remembers that it was left; it is not left by being forgotten, as a generator is."""

    def __init__(self) -> None:
        self.left = False

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        self.left = True


class Fails(Left):
    def __enter__(self) -> None:
        raise KeyError


def test_error_on_entry_reaches_the_caller_after_those_before_have_been_left() -> None:
    before, within = Left(), []

    with pytest.raises(KeyError), together([before, Fails()]):
        within.append("within")

    assert before.left
    assert not within
