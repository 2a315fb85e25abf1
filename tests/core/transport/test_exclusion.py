"""Who takes turns with whom."""

import threading
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import nn

from lightning_gpipe.core.layout import Layout, cut, lay_out
from lightning_gpipe.core.transport.exclusion import _REGISTRY, Exclusion, _Registry, _Turn
from tests.support.faults import OwnError
from tests.support.waiting import PATIENCE


def layout_of(*layers: nn.Module) -> Layout:
    return lay_out(cut(nn.Sequential(*layers), [len(layers)]), [torch.device("cpu")])


def test_pipelines_of_a_common_layer_have_a_turn_in_common() -> None:
    registry, shared = _Registry(), nn.Tanh()

    first = registry.turns_of(layout_of(nn.ReLU(), shared))
    second = registry.turns_of(layout_of(shared, nn.Linear(1, 1)))
    third = registry.turns_of(layout_of(nn.Linear(1, 1)))

    assert first == second
    assert not set(first) & set(third)


class Slow(WeakKeyDictionary[nn.Module, _Turn]):
    """A registry in whose first look a thread stays until it may go on."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go_on = threading.Event(), threading.Event()

    def get(self, key: nn.Module, default: Any = None) -> Any:
        found = super().get(key, default)
        if not self.begun.is_set():
            self.begun.set()
            assert self.go_on.wait(PATIENCE)
        return found


def test_pipelines_of_the_same_layers_come_from_two_threads() -> None:
    """Each thread would make a turn of its own, and not wait for the other."""
    registry, layout, slow = _Registry(), layout_of(nn.Tanh()), Slow()
    registry._turn_of = slow
    found: list[list[_Turn]] = []
    threads = [
        threading.Thread(target=lambda: found.append(registry.turns_of(layout))) for _ in range(2)
    ]

    threads[0].start()
    assert slow.begun.wait(PATIENCE)
    threads[1].start()
    threads[1].join(0.1)  # as it must wait for the other, it is not over by then
    slow.go_on.set()
    for thread in threads:
        thread.join(PATIENCE)

    assert found[0] == found[1]


def test_other_thread_waits_for_its_turn() -> None:
    exclusion, order = Exclusion(layout_of(nn.Tanh())), list[str]()

    def enter() -> None:
        with exclusion.entered():
            order.append("the other")

    other = threading.Thread(target=enter)
    with exclusion.entered():
        other.start()
        other.join(0.1)  # as it must wait, it is not over by then
        order.append("the first")
    other.join(PATIENCE)

    assert order == ["the first", "the other"]


def test_turn_is_given_back_after_an_error() -> None:
    exclusion = Exclusion(layout_of(nn.Tanh()))
    block = exclusion.entered()  # referred to, so that nothing ends because it is freed
    with pytest.raises(KeyError), block:
        raise KeyError

    entered = threading.Event()

    def enter() -> None:
        with exclusion.entered():
            entered.set()

    threading.Thread(target=enter, daemon=True).start()

    assert entered.wait(PATIENCE)
    assert all(turn.owner is None for turn in exclusion._turns)


def test_who_gets_a_turn_is_called_back_first() -> None:
    order: list[str] = []
    exclusion = Exclusion(layout_of(nn.Tanh()), before=lambda: order.append("before"))

    with exclusion.entered():
        order.append("within")

    assert order == ["before", "within"]


def test_turn_is_given_back_if_what_comes_before_fails() -> None:
    def fail() -> None:
        raise OwnError

    exclusion = Exclusion(layout_of(nn.Tanh()), before=fail)

    with pytest.raises(OwnError), exclusion.entered():
        pass

    [turn] = exclusion._turns
    assert turn.owner is None


def test_lock_of_another_process_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    turn = _Turn()
    before = turn.lock
    turn.owner = threading.current_thread()
    monkeypatch.setattr(_REGISTRY, "forks", _REGISTRY.forks + 1)  # as after a fork

    assert turn.lock is not before
    assert turn.owner is None
