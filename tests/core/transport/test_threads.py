import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch

from lightning_gpipe.core.transport.threads import (
    FRAMES,
    Outcomes,
    WorkerThread,
    frames_of_threads,
    lineage,
    working_for,
)
from tests.support.ranks import new_ranks
from tests.support.waiting import PATIENCE


@pytest.fixture
def thread() -> Iterator[WorkerThread]:
    thread = WorkerThread("worker under test")
    yield thread
    thread.end(PATIENCE)


def test_jobs_run_one_after_another(thread: WorkerThread) -> None:
    done: list[int] = []
    for k in range(5):
        thread.put(lambda k=k: done.append(k))  # type: ignore[misc]  # k is bound now

    thread.end(PATIENCE)

    assert done == [0, 1, 2, 3, 4]


def test_jobs_run_on_the_named_thread(thread: WorkerThread) -> None:
    seen: list[tuple[str, bool]] = []
    thread.put(lambda: seen.append((threading.current_thread().name, working_for([thread]))))

    thread.end(PATIENCE)

    assert seen == [("worker under test", True)]
    assert not working_for([thread])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="of other systems nobody asks")
@pytest.mark.parametrize(
    "name, first", [("gpipe-worker-3 (cuda:1)", "gpipe-worker-3"), ("worker", "worker")]
)
def test_system_knows_the_thread_by_the_first_word_of_its_name(name: str, first: str) -> None:
    names: list[str] = []
    thread = WorkerThread(name)

    thread.put(lambda: names.append(torch.multiprocessing._get_thread_name()))
    thread.end(PATIENCE)

    assert names == [first]


def test_thread_knows_for_whom_it_works_as_long_as_it_does(thread: WorkerThread) -> None:
    seen: list[list[threading.Thread]] = []

    thread.work(lambda: seen.append(lineage()))
    thread.put(lambda: seen.append(lineage()))
    thread.end(PATIENCE)

    assert seen == [[thread, threading.current_thread()], [thread]]


def test_thread_that_was_ended(thread: WorkerThread) -> None:
    before = thread.is_alive()

    thread.end(PATIENCE)

    assert before
    assert not thread.is_alive()


def test_thread_that_ends_itself_ends_after_the_job(thread: WorkerThread) -> None:
    done: list[str] = []

    def job() -> None:
        thread.end(PATIENCE)
        done.append("job")

    thread.put(job)
    thread.join(PATIENCE)

    assert done == ["job"]
    assert not thread.is_alive()


def test_ending_does_not_wait_longer_than_it_is_told(thread: WorkerThread) -> None:
    finish = threading.Event()

    def job() -> None:
        finish.wait(PATIENCE)

    thread.put(job)
    thread.end(0.01)

    assert thread.is_alive()
    finish.set()


def test_thread_does_not_keep_the_interpreter_alive(thread: WorkerThread) -> None:
    assert thread.daemon


def test_caller_sleeps_until_all_jobs_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here they end while it sleeps, so it would wait in vain if it did not."""
    outcomes = Outcomes(2)
    jobs = [outcomes.of(lambda: None) for _ in range(2)]
    monkeypatch.setattr(outcomes, "wait", lambda timeout: jobs.pop()())

    outcomes.wait_for_all(PATIENCE)

    assert outcomes.pending == 0


class Garbage:
    """Lets another thread run while it is finalized; nothing but a search finds it."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        time.sleep(0)


def look_while_threads_start(times: int) -> int:
    """How many threads start while another one looks at the frames, and garbage is searched."""
    gc.set_threshold(1)
    ended = threading.Event()

    def look() -> None:
        while not ended.is_set():
            with frames_of_threads() as frame_of:
                assert threading.get_ident() not in frame_of
                assert threading.main_thread().ident in frame_of
            Garbage()

    looking = threading.Thread(target=look)
    looking.start()
    for _ in range(times):
        each = threading.Thread(target=Garbage)
        each.start()
        each.join()
    ended.set()
    looking.join()
    return times


def test_threads_start_while_frames_are_looked_at() -> None:
    with new_ranks(1) as ranks:  # which may hang
        assert ranks.run(look_while_threads_start, 3000) == [3000]


class Gate(Garbage):
    """Lets a certain thread go on while it is finalized."""

    def __init__(self, opened: threading.Event, passed: threading.Event) -> None:
        super().__init__()
        self.opened, self.passed = opened, passed

    def __del__(self) -> None:
        self.opened.set()
        self.passed.wait(PATIENCE)


def look_while_calls_return() -> list[str]:
    """The functions on the stack of a thread that returns from them as soon as garbage is found."""
    opened, passed, ended = threading.Event(), threading.Event(), threading.Event()

    def descend(depth: int) -> None:
        if depth:
            descend(depth - 1)
        else:
            opened.wait(PATIENCE)

    def work() -> None:
        descend(20)
        passed.set()
        ended.wait(PATIENCE)  # in frames where those of the descent were

    thread = threading.Thread(target=work)
    thread.start()
    gc.collect()
    names = []
    with frames_of_threads() as frame_of:
        frame = frame_of.get(thread.ident or 0)
        Gate(opened, passed)
        gc.set_threshold(1)
        while frame is not None:
            names.append(frame.f_code.co_name)
            frame = frame.f_back
    ended.set()
    gc.collect()
    thread.join(PATIENCE)
    return names


def test_calls_return_while_a_stack_is_searched() -> None:
    with new_ranks(1) as ranks:  # which may die
        [names] = ranks.run(look_while_calls_return)

    assert names.count("descend") == 21


def call_while(look: Callable[[threading.Event], None]) -> weakref.ref[set[int]]:
    """Return a reference to what this call had, while another thread looked at its frame."""
    value, begun = set[int](), threading.Event()
    looking = threading.Thread(target=look, args=(begun,))
    looking.start()
    begun.wait(PATIENCE)
    return weakref.ref(value)


@pytest.mark.usefixtures("no_collector")
def test_frames_that_were_looked_at_keep_nothing() -> None:
    def look(begun: threading.Event) -> None:
        with frames_of_threads() as frame_of:
            kept.append(frame_of)
        begun.set()

    kept: list[object] = []

    assert call_while(look)() is None


@pytest.mark.usefixtures("no_collector")
def test_nothing_is_kept_while_nobody_looks() -> None:
    def look(begun: threading.Event) -> None:
        with frames_of_threads():
            begun.set()
            time.sleep(0.2)  # the call returns meanwhile

    value = call_while(look)
    with FRAMES:
        assert value() is None


@pytest.mark.usefixtures("no_collector")
def test_a_collector_that_was_off_stays_off() -> None:
    with frames_of_threads():
        pass

    assert not gc.isenabled()
