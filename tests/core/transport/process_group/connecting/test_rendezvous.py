"""Processes that meet, some late, some never, some of an earlier run; and calls in time."""

import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from threading import Event, Thread

import pytest
from torch._C._distributed_c10d import HashStore
from torch.distributed.distributed_c10d import Store

from lightning_gpipe.core.transport import call_with_timeout, store_barrier
from tests.support.faults import OwnError, throw
from tests.support.waiting import PATIENCE, awaited

LONG = timedelta(seconds=PATIENCE)
SHORT = timedelta(seconds=0.2)
RANKS = range(3)


def start(run: Callable[[], object]) -> Thread:
    thread = Thread(target=run)
    thread.start()
    return thread


def come(found: list[str], store: Store, rank: int) -> None:
    found.append(store_barrier(store, RANKS, rank, LONG, "come"))


def met(store: Store) -> set[str]:
    """The names that three processes agree on."""
    found: list[str] = []
    threads = [start(partial(come, found, store, k)) for k in RANKS]
    for thread in threads:
        thread.join()
    assert len(found) == 3
    return set(found)


def fails(store: Store, rank: int, timeout: timedelta) -> None:
    with pytest.raises(RuntimeError, match="all processes must come"):
        store_barrier(store, RANKS, rank, timeout, "come")


def test_all_agree_on_a_name_and_on_another_one_the_next_time() -> None:
    store = HashStore()

    names = [met(store) for _ in range(3)]

    assert [len(each) for each in names] == [1, 1, 1]
    assert len(set.union(*names)) == 3


def test_first_one_that_goes_on_to_the_next_meeting_at_once() -> None:
    store = HashStore()
    found: dict[int, list[str]] = {k: [] for k in RANKS}

    def come_often(rank: int) -> None:
        for _ in range(4):
            come(found[rank], store, rank)

    threads = [start(partial(come_often, k)) for k in RANKS]
    for thread in threads:
        thread.join()

    assert found[0] == found[1] == found[2]
    assert len(set(found[0])) == 4


def test_one_that_is_missing_is_named_by_the_first() -> None:
    store = HashStore()
    other = start(partial(fails, store, 2, LONG))

    with pytest.raises(RuntimeError, match="all processes must come: rank 1 did not within 0.2 s"):
        store_barrier(store, RANKS, 0, SHORT, "come")
    other.join()


@pytest.mark.parametrize("missing", [3, 20, 79])
def test_one_of_many_that_is_missing_is_named_to_all(missing: int) -> None:
    """It may have children, and a parent that is not the first one."""
    store, ranks = HashStore(), range(80)
    messages: dict[int, str] = {}

    def come_late(rank: int) -> None:
        try:
            store_barrier(store, ranks, rank, timedelta(seconds=2), "come")
        except RuntimeError as error:
            messages[rank] = str(error)

    threads = [start(partial(come_late, k)) for k in ranks if k != missing]
    for thread in threads:
        thread.join()

    assert len(messages) == 79
    assert all(f"rank {missing} did not" in message for message in messages.values())


def test_many_agree_on_a_name_that_all_offer() -> None:
    store, ranks = HashStore(), range(80)
    found: list[str] = []

    def offer(rank: int) -> None:
        found.append(store_barrier(store, ranks, rank, LONG, "come", "shared"))
        own = "shared" if rank != 77 else "another"
        found.append(store_barrier(store, ranks, rank, LONG, "come", own))

    threads = [start(partial(offer, k)) for k in ranks]
    for thread in threads:
        thread.join()

    assert found.count("shared") == 80
    assert len(set(found)) == 2


def test_first_one_that_is_missing() -> None:
    with pytest.raises(RuntimeError, match="rank 0 did not"):
        store_barrier(HashStore(), RANKS, 1, SHORT, "come")


def test_run_that_was_ended_while_its_processes_met_and_is_started_again() -> None:
    """Once what had been written by the first run was taken for the second one's."""
    store = HashStore()
    for k in (1, 2, 0, 1):
        fails(store, k, SHORT)

    assert len(met(store)) == 1


def test_one_that_comes_before_the_first_and_finds_the_name_of_an_earlier_run() -> None:
    store = HashStore()
    (first,) = met(store)
    places = [f"0-2/{first}/{k}" for k in (1, 2)]
    before = [store.get(each) for each in places]
    found: list[str] = []
    others = [start(partial(come, found, store, k)) for k in (1, 2)]
    assert awaited(lambda: any(store.get(each) in before for each in places), False) is False

    found.append(store_barrier(store, RANKS, 0, LONG, "come"))
    for each in others:
        each.join()

    assert len(set(found)) == 1
    assert first not in found


def test_answer_in_time() -> None:
    assert call_with_timeout(LONG, lambda: 3, "nobody answered") == 3


def test_error_in_time() -> None:
    with pytest.raises(OwnError):
        call_with_timeout(LONG, throw(OwnError("asked")), "nobody answered")


def test_no_answer() -> None:
    never = Event()

    with pytest.raises(RuntimeError, match="nobody answered within 0.01 s"):
        call_with_timeout(timedelta(seconds=0.01), lambda: never.wait(PATIENCE), "nobody answered")

    never.set()


# The answer comes a second after the interpreter has begun to end, which takes two more.
ENDING = """
import sys, time
from datetime import timedelta
from torch._C._distributed_c10d import HashStore
from lightning_gpipe.core.transport import call_with_timeout


class LongEnd:
    def __del__(self, sleep=time.sleep):
        sleep(2.0)


last, store = LongEnd(), HashStore()
wait = lambda: store.wait(["never"], timedelta(seconds=2.2))
call_with_timeout(timedelta(seconds=0.2), wait, "no answer")
"""


@pytest.mark.launches
@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="threads cannot be stopped")
def test_answer_that_comes_while_the_interpreter_ends() -> None:
    """Once it ended the process by SIGABRT: "terminate called without an active exception"."""
    ended = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True)

    assert ended.stderr.splitlines()[-1] == "RuntimeError: no answer within 0.2 s."
    assert ended.returncode == 1
