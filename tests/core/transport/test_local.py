"""Workers on threads: values arrive, errors reach the caller, and threads end.

Here are also the tests of ``interface``.
"""

import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest
import torch
from typing_extensions import override

from lightning_gpipe.core.data.pytree import FlatTree, tree_flatten
from lightning_gpipe.core.programs import Route, SkipName
from lightning_gpipe.core.schedules import Action, Kind, fill_drain
from lightning_gpipe.core.transport import local
from lightning_gpipe.core.transport.interface import Exchange, RunCancelled
from lightning_gpipe.core.transport.local import LocalExchange, LocalTransport
from lightning_gpipe.core.transport.threads import Outcomes
from tests.support.faults import Busy
from tests.support.placements import one_each
from tests.support.transports import Job, layout_of
from tests.support.waiting import NEVER, PATIENCE, awaited

CPU = torch.device("cpu")

Workers = Callable[[], list[threading.Thread]]


@pytest.fixture(autouse=True)
def _threads_may_take_long_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "JOIN", PATIENCE)


@pytest.fixture
def workers() -> Workers:
    """Lists the workers' threads that came since the test began."""
    before = set(threading.enumerate())
    return lambda: [
        thread
        for thread in threading.enumerate()
        if thread.name.startswith("gpipe-worker") and thread not in before
    ]


@pytest.fixture
def transport() -> Iterator[LocalTransport]:
    transport = LocalTransport(layout_of(2, [CPU, CPU]))
    yield transport
    transport.close()


PHASE = fill_drain(1, one_each(1)).phase(0)  # threads run the rows that their tasks have


def nothing() -> None:
    pass


def run(
    transport: LocalTransport, exchange: Exchange, functions: Sequence[Callable[[], object]]
) -> None:
    transport.run(exchange, list(map(Job, functions)))


def forward(i: int, j: int) -> Action:
    return Action(Kind.FORWARD, i, j)


def fail(error: BaseException) -> None:
    raise error


def take_a_while() -> None:
    time.sleep(0.1)


def note(place: list[threading.Thread]) -> None:
    place.append(threading.current_thread())


# The mail.


def test_mail_comes_by_what_needs_it_not_by_when_it_was_sent(transport: LocalTransport) -> None:
    exchange = transport.open(PHASE)
    for i in (2, 0, 1):
        exchange.send(forward(i, 1), tree_flatten(f"output {i}"))

    received = [exchange.receive(forward(i, 1)).leaves for i in range(3)]

    assert received == [["output 0"], ["output 1"], ["output 2"]]


def test_mail_goes_to_the_caller_at_both_ends(transport: LocalTransport) -> None:
    exchange = transport.open(PHASE)

    exchange.send(forward(0, 2), tree_flatten("output"))
    exchange.send(Action(Kind.BACKWARD, 0, -1), tree_flatten("gradient"))

    assert exchange.receive(Action(Kind.BACKWARD, 0, -1)).leaves == ["gradient"]
    assert exchange.receive(forward(0, 2)).leaves == ["output"]


def test_tensor_on_its_device_is_handed_over_as_it_is(transport: LocalTransport) -> None:
    exchange, x = transport.open(PHASE), torch.ones(2, requires_grad=True)

    exchange.send(forward(0, 1), tree_flatten((x, "name")))

    received = exchange.receive(forward(0, 1)).leaves
    assert received[0] is x


def test_tensor_arrives_on_the_device_of_the_stage_and_requires_what_it_did() -> None:
    exchange = LocalTransport(layout_of(2, [CPU, torch.device("meta")])).open(PHASE)

    exchange.send(
        forward(0, 1), tree_flatten((torch.ones(2, requires_grad=True), torch.ones(1), 3))
    )

    x, y, three = exchange.receive(forward(0, 1)).leaves
    assert x.is_meta and y.is_meta and three == 3
    assert (x.requires_grad, y.requires_grad) == (True, False)


def test_mail_of_skips_comes_apart_from_that_of_the_stage_beside() -> None:
    exchange = LocalTransport(layout_of(3, [CPU] * 3)).open(PHASE)
    one, other = Route(SkipName(None, "one"), 0, 2), Route(SkipName(None, "other"), 1, 2)
    copied = Route(SkipName(None, "one"), 0, 2)

    exchange.send(forward(0, 2), FlatTree(["of the second"]), other)
    exchange.send(forward(1, 2), FlatTree(["of the next micro-batch"]), one)
    exchange.send(forward(0, 2), tree_flatten("output"))
    exchange.send(forward(0, 2), FlatTree(["of the first"]), one)

    assert exchange.receive(forward(0, 2), copied).leaves == ["of the first"]
    assert exchange.receive(forward(0, 2)).leaves == ["output"]
    assert exchange.receive(forward(1, 2), one).leaves == ["of the next micro-batch"]
    assert exchange.receive(forward(0, 2), other).leaves == ["of the second"]


def test_gradients_of_skips_go_back_to_their_stage() -> None:
    exchange = LocalTransport(layout_of(4, [CPU, CPU])).open(PHASE)
    route = Route(SkipName(None, "x"), 0, 3)

    exchange.send(Action(Kind.BACKWARD, 0, 2), FlatTree(["gradient"]))
    exchange.send(Action(Kind.BACKWARD, 0, 0), FlatTree(["of the skip"]), route)

    assert exchange.receive(Action(Kind.BACKWARD, 0, 0), route).leaves == ["of the skip"]
    assert exchange.receive(Action(Kind.BACKWARD, 0, 2)).leaves == ["gradient"]


@pytest.mark.parametrize("kind", [Kind.FORWARD, Kind.BACKWARD])
def test_skip_is_copied_from_its_stage_and_not_from_the_one_beside(kind: Kind) -> None:
    """What stays where it is are tensors on other devices than the sender's."""
    meta = torch.device("meta")
    devices, j = ([CPU, meta, meta], 2) if kind is Kind.FORWARD else ([meta, meta, CPU], 0)
    exchange = LocalTransport(layout_of(3, devices)).open(PHASE)
    route, x = Route(SkipName(None, "x"), 0, 2), torch.ones(2, requires_grad=True)

    exchange.send(Action(kind, 0, j), FlatTree([x, None]), route)

    received, nothing = exchange.receive(Action(kind, 0, j), route).leaves
    assert received.is_meta and received.requires_grad
    assert nothing is None


def test_cancelled_exchange_wakes_who_waits(
    transport: LocalTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "POLL", NEVER)
    exchange = transport.open(PHASE)
    timer = threading.Timer(0.05, exchange.cancel)
    timer.start()

    with pytest.raises(RunCancelled):
        exchange.receive(forward(0, 0))
    with pytest.raises(RunCancelled):
        exchange.check()
    timer.join()


# The workers.


def test_workers_pass_on_what_they_made(transport: LocalTransport) -> None:
    exchange = transport.open(PHASE)

    def work(j: int) -> None:
        for i in range(3):
            (value,) = exchange.receive(forward(i, j)).leaves
            exchange.send(forward(i, j + 1), tree_flatten(f"{value}, stage {j}"))

    for i in range(3):
        exchange.send(forward(i, 0), tree_flatten(f"batch {i}"))
    run(transport, exchange, [partial(work, 0), partial(work, 1)])

    results = [exchange.receive(forward(i, 2)).leaves[0] for i in range(3)]
    assert results == [f"batch {i}, stage 0, stage 1" for i in range(3)]


def test_each_worker_has_a_named_thread_that_stays(transport: LocalTransport) -> None:
    seen: list[list[threading.Thread]] = [[], []]

    for _ in range(3):
        run(transport, transport.open(PHASE), [partial(note, place) for place in seen])

    assert [{thread.name for thread in place} for place in seen] == [
        {"gpipe-worker-0 (cpu)"},
        {"gpipe-worker-1 (cpu)"},
    ]
    assert len(set(seen[0] + seen[1])) == 2


def test_constructing_starts_no_thread(workers: Workers) -> None:
    LocalTransport(layout_of(2, [CPU, CPU])).open(PHASE)

    assert workers() == []


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("error", [KeyError("k"), KeyboardInterrupt(), SystemExit(3)], ids=repr)
def test_error_reaches_the_caller_while_the_other_waits(
    transport: LocalTransport,
    error: BaseException,
    failing: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local, "POLL", NEVER)
    monkeypatch.setattr(local, "GRACE", NEVER)
    exchange = transport.open(PHASE)
    ends: list[BaseException] = []

    def wait() -> None:
        try:
            exchange.receive(forward(0, 1 - failing))
        except BaseException as end:
            ends.append(end)
            raise

    jobs: list[Callable[[], None]] = [wait, wait]
    jobs[failing] = partial(fail, error)
    with pytest.raises(type(error)) as caught:
        run(transport, exchange, jobs)

    assert caught.value is error
    assert [type(end) for end in ends] == [RunCancelled]


def test_error_reaches_the_caller_while_the_other_is_busy(transport: LocalTransport) -> None:
    busy = Busy()

    with pytest.raises(KeyError):
        run(transport, transport.open(PHASE), [partial(fail, KeyError()), busy])

    assert not busy.over
    busy.end()


def test_caller_waits_less_than_a_second_for_a_busy_worker_or_one_that_died() -> None:
    assert local.POLL + local.GRACE < 1


def test_run_within_a_run_of_the_same_transport(transport: LocalTransport) -> None:
    def run_within() -> None:
        run(transport, transport.open(PHASE), [nothing, nothing])

    with pytest.raises(RuntimeError, match="must not run the pipeline that it is part of"):
        run(transport, transport.open(PHASE), [run_within, nothing])


def test_used_again_after_an_error(transport: LocalTransport) -> None:
    with pytest.raises(KeyError):
        run(transport, transport.open(PHASE), [partial(fail, KeyError()), nothing])
    seen: list[threading.Thread] = []

    run(transport, transport.open(PHASE), [partial(note, seen), partial(note, seen)])

    assert len(seen) == 2


# pytest reports what the thread dies of, here SystemExit.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_thread_that_died_is_reported_and_replaced(transport: LocalTransport) -> None:
    run(transport, transport.open(PHASE), [nothing, nothing])
    kill = threading.Event()

    def die() -> None:  # outside any run, so nobody records how it ended
        kill.wait(PATIENCE)
        sys.exit()

    transport._pool.threads[0].put(die)
    with pytest.raises(RuntimeError, match=r"thread of worker 0 \(cpu\) must live as long"):
        run(transport, transport.open(PHASE), [nothing, kill.set])
    run(transport, transport.open(PHASE), [nothing, nothing])

    assert [thread.is_alive() for thread in transport._pool.threads] == [True, True]


def test_close_leaves_no_thread(transport: LocalTransport, workers: Workers) -> None:
    run(transport, transport.open(PHASE), [nothing, nothing])
    assert len(workers()) == 2

    transport.close()

    assert workers() == []


def test_used_again_after_close(transport: LocalTransport, workers: Workers) -> None:
    run(transport, transport.open(PHASE), [nothing, nothing])
    transport.close()
    transport.close()
    seen: list[threading.Thread] = []

    run(transport, transport.open(PHASE), [partial(note, seen), nothing])

    assert seen[0] in workers()


def test_transport_that_nobody_closed_ends_its_threads(workers: Workers) -> None:
    transport = LocalTransport(layout_of(2, [CPU, CPU]))
    run(transport, transport.open(PHASE), [nothing, nothing])
    assert len(workers()) == 2

    del transport
    gc.collect()

    assert workers() == []


def test_nothing_of_a_finished_job_stays_alive(transport: LocalTransport) -> None:
    class Payload:
        pass

    payload = Payload()
    alive = weakref.ref(payload)
    exchange: LocalExchange | None = transport.open(PHASE)
    assert exchange is not None

    run(transport, exchange, [lambda kept=payload: None, nothing])  # type: ignore[misc]  # a job
    del payload, exchange
    # The thread tells how a job ended before it lets go of it.
    assert awaited(alive, None) is None


class Fault(Exception):
    """An error to which there can be a weak reference."""


def break_down() -> None:
    raise Fault


@pytest.fixture
def _no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_collector")
def test_error_is_freed_once_it_is_handled(transport: LocalTransport) -> None:
    """Its traceback refers to all that was local in the layers, which can be gigabytes."""

    def handled() -> weakref.ref[Fault]:
        try:
            run(transport, transport.open(PHASE), [break_down, nothing])
        except Fault as error:
            return weakref.ref(error)
        raise AssertionError

    assert awaited(handled(), None) is None


# One run at a time.


def test_other_thread_waits_until_the_run_has_ended(transport: LocalTransport) -> None:
    busy, order = Busy(), list[str]()

    def work() -> None:
        busy()
        order.append("the run")

    def enter() -> None:
        with transport.exclusive():
            order.append("the other")

    caller = threading.Thread(target=run, args=(transport, transport.open(PHASE), [work, nothing]))
    other = threading.Thread(target=enter)
    caller.start()
    assert busy.begun.wait(PATIENCE)
    other.start()
    other.join(0.1)  # as it must wait, it is not over by then
    busy.end()
    caller.join(PATIENCE)
    other.join(PATIENCE)

    assert order == ["the run", "the other"]


def test_next_turn_waits_for_the_busy_worker_of_a_failed_run(transport: LocalTransport) -> None:
    busy, over = Busy(), list[bool]()
    with pytest.raises(KeyError):
        run(transport, transport.open(PHASE), [partial(fail, KeyError()), busy])

    def enter() -> None:
        with transport.exclusive():
            over.append(busy.over)

    other = threading.Thread(target=enter)
    other.start()
    other.join(0.1)  # as it must wait, it is not over by then
    busy.end()
    other.join(PATIENCE)

    assert over == [True]


@pytest.mark.parametrize("after", ["a run", "a failed run and the wait for it"])
def test_next_turn_does_not_ask_threads_that_have_ended(
    transport: LocalTransport, after: str
) -> None:
    """A message to each thread and back would cost every mini-batch."""
    if after == "a run":
        run(transport, transport.open(PHASE), [nothing, nothing])
    else:
        with pytest.raises(KeyError):
            run(transport, transport.open(PHASE), [partial(fail, KeyError()), nothing])
        with transport.exclusive():
            pass
    busy, entered = Busy(), threading.Event()
    transport._pool.threads[0].put(busy)

    def enter() -> None:
        with transport.exclusive():
            entered.set()

    other = threading.Thread(target=enter)
    other.start()

    assert entered.wait(PATIENCE / 2)
    busy.end()
    other.join(PATIENCE)


class Abandoned(Job):
    """A task that takes its time to be abandoned."""

    def __init__(self, function: Callable[[], object]) -> None:
        super().__init__(function)
        self.over = False

    @override
    def abandon(self) -> None:
        take_a_while()
        self.over = True


def test_busy_task_is_abandoned_before_the_error_reaches_the_caller(
    transport: LocalTransport,
) -> None:
    busy = Busy()
    task = Abandoned(busy)

    with pytest.raises(KeyError):
        transport.run(transport.open(PHASE), [Job(partial(fail, KeyError())), task])

    assert task.over
    busy.end()


def test_busy_task_is_abandoned_although_the_wait_for_it_is_interrupted(
    transport: LocalTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = Busy()
    task = Abandoned(busy)
    run(transport, transport.open(PHASE), [nothing, nothing])
    monkeypatch.setattr(Outcomes, "wait_for_all", lambda self, timeout: fail(KeyboardInterrupt()))

    with pytest.raises(KeyboardInterrupt):
        transport.run(transport.open(PHASE), [Job(partial(fail, KeyError())), task])

    assert task.over
    busy.end()


def test_caller_sleeps_while_the_workers_work(
    transport: LocalTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller that looked again and again would take the core of a worker."""
    monkeypatch.setattr(local, "POLL", NEVER)
    looks: list[None] = []
    monkeypatch.setattr(transport, "_check_threads", lambda: looks.append(None))

    run(transport, transport.open(PHASE), [take_a_while, nothing])

    assert len(looks) <= 1


# Intra-op threads.


@pytest.fixture
def _four_intra_op_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def intra_op_of(place: list[int]) -> None:
    place.append(torch.get_num_threads())


@pytest.mark.usefixtures("_four_intra_op_threads")
def test_the_callers_intra_op_threads_stay(transport: LocalTransport) -> None:
    run(transport, transport.open(PHASE), [nothing, nothing])
    found: list[int] = []
    later = threading.Thread(target=intra_op_of, args=(found,))
    later.start()
    later.join()

    assert torch.get_num_threads() == 4
    assert found == [4]


@pytest.mark.usefixtures("_four_intra_op_threads")
@pytest.mark.parametrize("count, share", [(2, 2), (3, 1), (8, 1)])
def test_workers_share_the_callers_intra_op_threads(count: int, share: int) -> None:
    """Once a thread took PyTorch's default when first asked, which undid what had been set."""
    transport = LocalTransport(layout_of(count, [CPU] * count))
    found: list[int] = []

    run(transport, transport.open(PHASE), [partial(intra_op_of, found)] * count)
    transport.close()

    assert found == [share] * count


@pytest.mark.usefixtures("_four_intra_op_threads")
def test_workers_follow_the_callers_intra_op_threads(transport: LocalTransport) -> None:
    run(transport, transport.open(PHASE), [nothing, nothing])
    torch.set_num_threads(2)
    found: list[int] = []

    run(transport, transport.open(PHASE), [partial(intra_op_of, found)] * 2)

    assert found == [1, 1]


def wait_at(exchange: LocalExchange) -> None:
    exchange.receive(forward(0, 0))


def test_caller_is_interrupted_while_it_hands_out_jobs(
    transport: LocalTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the worker that had its job already waited for the other for ever."""
    monkeypatch.setattr(local, "POLL", NEVER)
    run(transport, transport.open(PHASE), [nothing, nothing])
    exchange = transport.open(PHASE)
    with monkeypatch.context() as patch:
        patch.setattr(transport._pool.threads[1], "put", lambda job: fail(KeyboardInterrupt()))
        jobs: list[Callable[[], None]] = [lambda: wait_at(exchange), nothing]
        with pytest.raises(KeyboardInterrupt):
            run(transport, exchange, jobs)

    run(transport, transport.open(PHASE), [nothing, nothing])


def test_caller_does_not_wait_for_what_no_worker_made(transport: LocalTransport) -> None:
    with pytest.raises(RuntimeError, match="it ended without"):
        transport.open(PHASE).receive(forward(0, 2))


@pytest.mark.usefixtures("_four_intra_op_threads")
def test_caller_is_interrupted_while_the_workers_take_their_share(
    transport: LocalTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = Outcomes.wait_for_all

    def interrupted(outcomes: Outcomes, timeout: float) -> None:
        wait(outcomes, timeout)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Outcomes, "wait_for_all", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(transport, transport.open(PHASE), [nothing, nothing])
    found: list[int] = []
    later = threading.Thread(target=intra_op_of, args=(found,))
    later.start()
    later.join()

    assert found == [4]


@pytest.mark.usefixtures("_four_intra_op_threads")
def test_share_is_set_once(transport: LocalTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    run(transport, transport.open(PHASE), [nothing, nothing])
    calls: list[int] = []

    with monkeypatch.context() as patch:
        patch.setattr(torch, "set_num_threads", calls.append)
        run(transport, transport.open(PHASE), [nothing, nothing])

    assert calls == []


@pytest.mark.usefixtures("_four_intra_op_threads")
def test_threads_that_come_later_have_the_callers_number_although_a_worker_is_slow(
    transport: LocalTransport,
) -> None:
    run(transport, transport.open(PHASE), [nothing, nothing])
    torch.set_num_threads(2)
    transport._pool.threads[0].put(take_a_while)
    found: list[int] = []

    run(transport, transport.open(PHASE), [nothing, nothing])
    later = threading.Thread(target=intra_op_of, args=(found,))
    later.start()
    later.join()

    assert found == [2]
