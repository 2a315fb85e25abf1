"""Process-wide state: settings that a test changes and restores, and the threads."""

import gc
import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis.strategies import none

from tests.support.waiting import awaited


@contextmanager
def seeded(seed: int = 5) -> Iterator[None]:
    """Draw from a seed inside the block; what is drawn after it does not depend on it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


@pytest.fixture
def own_generator() -> Iterator[None]:
    """A test may seed the generator: the next one finds it as this one did."""
    with torch.random.fork_rng(devices=[]):
        yield


@pytest.fixture
def level_of_lightnings_log() -> Iterator[None]:
    """What an example sets for its whole process is as before after the test."""
    log = logging.getLogger("lightning.pytorch")
    before = log.level
    yield
    log.setLevel(before)


@pytest.fixture
def lightning_cli(monkeypatch: pytest.MonkeyPatch) -> None:
    """A LightningCLI runs without warnings, and leaves the environment as it was."""
    # It warns of arguments of the process besides its own, here pytest's.
    monkeypatch.setattr(sys, "argv", ["lightning_gpipe"])
    # seed_everything writes to the environment; this puts it back.
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    monkeypatch.setenv("PL_SEED_WORKERS", "0")
    # Lightning 2.6, cli.py, calls add_instantiator, which jsonargparse 4.49 deprecates.
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What is freed is freed because nothing refers to it, not even itself in a circle."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def one_intra_op_thread() -> Iterator[None]:
    """Operators on a few rows gain nothing by two, and lose much where the cores are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def workers() -> list[threading.Thread]:
    """The threads of all pipelines."""
    return [each for each in threading.enumerate() if each.name.startswith("gpipe-worker")]


@pytest.fixture(scope="session", autouse=True)
def _collector() -> Iterator[None]:
    """Is left as it was found, so that nothing looks like a leak when the interpreter ends."""
    given(none())(lambda _: None)()  # for its generator hypothesis asks who refers to it
    yield
    gc.unfreeze()


@pytest.fixture(scope="module", autouse=True)
def _short_search_for_garbage(_collector: None) -> None:
    """Leaves out what was there before: thousands of objects of torch, which nothing frees.

    Not the pipelines that earlier tests dropped: of one whose worker was still at work the threads
    would be left for ever.
    """
    nothing: list[threading.Thread] = []
    left = awaited(_workers_after_a_collection, nothing)
    assert left == nothing, "a pipeline of an earlier test is still open"
    gc.freeze()


def _workers_after_a_collection() -> list[threading.Thread]:
    gc.collect()
    return workers()
