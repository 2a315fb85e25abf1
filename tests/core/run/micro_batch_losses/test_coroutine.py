import sys
from contextvars import ContextVar, copy_context
from functools import partial

import pytest

from lightning_gpipe import GPipe, GPipeStrategy
from lightning_gpipe.core.run.micro_batch_losses import coroutine as module
from lightning_gpipe.core.run.micro_batch_losses.coroutine import Coroutine
from tests.support.models import perceptron, rows
from tests.support.ranks import new_ranks


def test_two_in_turns() -> None:
    said = []

    def talk(name: str) -> str:
        said.append(name)
        said.append(coroutines[name].suspend(f"{name} waits"))
        return f"{name} ends"

    coroutines = {name: Coroutine(partial(talk, name), copy_context()) for name in "ab"}

    assert [coroutines[name].resume() for name in "ab"] == ["a waits", "b waits"]
    assert not coroutines["a"].ended
    assert [coroutines[name].resume(f"{name} goes on") for name in "ba"] == ["b ends", "a ends"]
    assert coroutines["a"].ended
    assert said == ["a", "b", "b goes on", "a goes on"]


def test_error_arrives_where_it_is_resumed() -> None:
    def fail() -> None:
        raise KeyError("this")

    coroutine = Coroutine(fail, copy_context())
    with pytest.raises(KeyError, match="this"):
        coroutine.resume()
    assert coroutine.ended


def test_closed_runs_its_finally_block() -> None:
    ended: list[bool] = []

    def wait() -> None:
        try:
            coroutine.suspend(None)
        finally:
            ended.append(True)

    coroutine = Coroutine(wait, copy_context())
    coroutine.resume()
    coroutine.close()

    assert ended == [True]
    assert coroutine.ended


def test_closed_before_it_began() -> None:
    coroutine = Coroutine(lambda: pytest.fail("it must not run"), copy_context())
    coroutine.close()
    assert coroutine.ended


def test_context_variables_are_its_own() -> None:
    variable = ContextVar("variable", default="unset")

    def change() -> str:
        found = variable.get()
        variable.set("in the coroutine")
        return found

    variable.set("outside")
    assert Coroutine(change, copy_context()).resume() == "outside"
    assert variable.get() == "outside"


def test_greenlet_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(module, "import_module", missing)
    module.greenlets.cache_clear()
    with pytest.raises(ModuleNotFoundError, match="Run pip install greenlet, or"):
        Coroutine(lambda: None, copy_context())


def test_module_that_greenlet_needs_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> None:
        raise ModuleNotFoundError("No module named 'other'", name="other")

    monkeypatch.setattr(module, "import_module", missing)
    module.greenlets.cache_clear()
    with pytest.raises(ModuleNotFoundError, match="^No module named 'other'$"):
        Coroutine(lambda: None, copy_context())


def greenlet_is_imported() -> list[bool]:
    GPipeStrategy([1, 1], split_backward=True)
    model = GPipe(perceptron(2), [1, 1], chunks=2, split_backward=True)
    model(rows(2)).sum().backward()
    found = ["greenlet" in sys.modules]
    model.by_micro_batch(lambda x: model(x).mean(), rows(2))
    model.close()
    return [*found, "greenlet" in sys.modules]


def test_greenlet_is_imported_only_when_asked_for() -> None:
    """A pipeline that runs by fill-drain does not need it, nor does a strategy."""
    with new_ranks(1) as ranks:  # in which nothing has run
        assert ranks.run(greenlet_is_imported) == [[False, True]]
