"""The states of generators as one value: those of PyTorch, Python and NumPy, and held ones."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from lightning_gpipe.core.faithful.journal import Journal
from lightning_gpipe.core.faithful.managers import Bracket
from lightning_gpipe.core.faithful.random.random_state import (
    LIBRARIES,
    ForeignGenerator,
    RandomState,
)


def _torch() -> float:
    return torch.rand(()).item()


def _numpy() -> float:
    return np.random.rand()  # the generator of the process is what is tested


@pytest.fixture(autouse=True)
def _unchanged() -> Iterator[None]:
    state = RandomState.capture()
    yield
    state.restore()


DRAWS = {"cpu": _torch, "random": random.random, "numpy.random": _numpy}


@pytest.mark.parametrize("name", DRAWS)
def test_generator_that_was_drawn_from_is_named_and_restored(name: str) -> None:
    draw, state = DRAWS[name], RandomState.capture()

    first = draw()

    assert state.differences() == [name]
    state.restore()
    assert state.differences() == []
    assert draw() == first


def test_generators_that_were_not_drawn_from_do_not_differ() -> None:
    assert RandomState.capture([torch.device("cpu"), torch.device("meta")]).differences() == []


def test_libraries_alone() -> None:
    state = RandomState.of(LIBRARIES)

    _torch()

    assert state.differences() == []


HELD: dict[str, Callable[[], tuple[object, Callable[[], object]]]] = {
    "torch": lambda: (own := torch.Generator(), lambda: torch.rand((), generator=own).item()),
    "random": lambda: (own := random.Random(3), own.random),
    "default_rng": lambda: (own := np.random.default_rng(3), own.random),
    "RandomState": lambda: (own := np.random.RandomState(3), own.random_sample),
}


@pytest.mark.parametrize("kind", HELD)
def test_generator_that_a_module_holds_draws_the_same_again(kind: str) -> None:
    generator, draw = HELD[kind]()
    state = RandomState.of([ForeignGenerator.of(generator)])

    first = draw()
    second = draw()
    with Journal().changed(state.writes()):
        again = draw()
    state.restore()

    assert again == first != second
    assert draw() == first


def test_states_are_restored_after_a_replay() -> None:
    state = RandomState.capture()
    first, after = _torch(), RandomState.capture()

    with Bracket(state.exchange, RandomState.restore):
        again = _torch()

    assert again == first
    assert after.differences() == []
