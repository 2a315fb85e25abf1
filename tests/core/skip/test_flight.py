"""Promise: what is in flight belongs to one thread, and to one micro-batch on one stage."""

import pickle
import threading
from copy import deepcopy
from uuid import uuid4

import pytest
import torch

from lightning_gpipe.core.programs import SkipName
from lightning_gpipe.core.skip.declare import Table, in_flight, using_table
from tests.support.skip_layers import Pop, Stash
from tests.support.waiting import PATIENCE

X = SkipName(None, "x")


def test_own_table_for_a_with_block() -> None:
    outer: Table = {X: torch.ones(1)}
    inner: Table = {}

    with using_table(outer):
        with using_table(inner):
            Stash()(torch.zeros(1))
            assert in_flight() is inner
        assert in_flight() is outer

    assert list(inner) == [SkipName(None, "skip")]
    assert list(outer) == [X]
    assert X not in in_flight()


def test_table_of_before_comes_back_after_an_error() -> None:
    before = in_flight()

    with pytest.raises(RuntimeError, match="'skip' must be stashed before Pop"), using_table({}):
        Pop()(torch.ones(1))

    assert in_flight() is before


def test_threads_have_tables_of_their_own() -> None:
    found: list[Table] = []
    thread = threading.Thread(target=lambda: found.append(dict(in_flight())))

    with using_table({X: None}):
        thread.start()
        thread.join()

    assert found == [{}]


def test_threads_that_run_the_same_layers() -> None:
    stash, pop, barrier = Stash(), Pop(), threading.Barrier(3, timeout=PATIENCE)
    results: dict[int, float] = {}

    def run(k: int) -> None:
        x = stash(torch.full((1,), float(k)))
        barrier.wait()
        results[k] = pop(x).item()

    threads = [threading.Thread(target=run, args=(k,)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert results == {0: 0.0, 1: 2.0, 2: 4.0}


def test_name_in_a_message() -> None:
    assert str(X) == "'x'"
    assert str(SkipName(uuid4(), "x")) == "'x' (isolated)"


def test_copies_of_a_name_are_equal() -> None:
    name = SkipName(uuid4(), "x")

    assert deepcopy(name) == pickle.loads(pickle.dumps(name)) == name
    assert name not in (X, SkipName(uuid4(), "x"))
