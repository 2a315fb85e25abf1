"""Many processes, each connected with a few: 32, and 256 in a soak; all hear what all must know.

They are threads of one process, over a network that the test plays. Here are also the tests of
``link`` and ``links`` that need more than a few processes.
"""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from hypothesis import settings

from lightning_gpipe.core.data import tree_flatten
from lightning_gpipe.core.schedules import Action, Kind
from lightning_gpipe.core.transport.process_group.ledger import Failure
from lightning_gpipe.core.transport.process_group.office import Office
from lightning_gpipe.core.transport.process_group.tree import FAN_OUT, Tree
from lightning_gpipe.core.transport.process_group.wire.message import Header, Mail, MessageCode
from tests.support.faults import OwnError
from tests.support.played_network import Network, Recorder, offices
from tests.support.waiting import NEVER, PATIENCE

SIZE = 256 if settings().max_examples > 1000 else 32
SILENT = timedelta(seconds=NEVER)  # no process is lost only because it is silent
MAIL = Mail(Action(Kind.FORWARD, 0, 0), None, tree_flatten(torch.ones(3)))
INNER = 1  # a process with a parent and children
MOST_LINKS = FAN_OUT + 4  # a family, the parent in another tree, and two neighbours in a chain


def begin(processes: list[Office]) -> list[Recorder]:
    """An exchange of all."""
    found = [Recorder() for _ in processes]
    for office, recorder in zip(processes, found, strict=True):
        _, failure = office.begin(recorder)
        assert failure is None
    return found


def run_step(processes: list[Office]) -> None:
    """A forward along the chain, whose output goes to all, and a backward likewise."""
    recorders, size = begin(processes), len(processes)
    header = Header(MessageCode.VALUES, processes[0].ledger.serial)
    for rank, office in enumerate(processes):
        near = [k for k in (rank - 1, rank + 1) if 0 <= k < size]
        for other in near:
            office.links.post(other, header, MAIL)
    for rank in (0, size - 1):
        processes[rank].links.post_to_all(header, MAIL)
    for rank, recorder in enumerate(recorders):
        from_all = [k for k in (0, size - 1) if k != rank]
        near = [k for k in (rank - 1, rank + 1) if 0 <= k < size]
        assert recorder.await_arrivals(len(from_all + near), PATIENCE)
        assert sorted(recorder.arrived) == sorted(from_all + near)
        assert processes[rank].end() is None


def sent(network: Network, code: MessageCode) -> dict[int, Counter[int]]:
    """How often each process has sent a kind of message to each other one."""
    found: dict[int, Counter[int]] = {}
    for rank, counted in network.messages.items():
        found[rank] = Counter({to: k for (each, to), k in counted.items() if each == code})
    return found


def close(processes: list[Office]) -> None:
    with ThreadPoolExecutor(len(processes)) as pool:
        list(pool.map(Office.close, processes))


def test_step_connects_each_process_with_a_few_and_sends_little() -> None:
    with offices(SIZE, SILENT) as (network, processes):
        run_step(processes)
        first = sent(network, MessageCode.VALUES)
        run_step(processes)
        second = sent(network, MessageCode.VALUES)

        assert max(len([*office.links]) for office in processes) <= MOST_LINKS
        assert max(sum(each.values()) for each in first.values()) <= FAN_OUT + 2
        assert all(second[rank].total() == 2 * first[rank].total() for rank in first)
        close(processes)
        assert all(len(each) <= MOST_LINKS for each in sent(network, MessageCode.END).values())
        assert sum(each.total() for each in sent(network, MessageCode.CLOSED).values()) > 0
        run_step(processes)  # they begin again


@pytest.mark.parametrize("failing", [0, INNER, SIZE - 1])
def test_failure_of_one_is_told_to_all_and_the_next_step_works(failing: int) -> None:
    with offices(SIZE, SILENT) as (network, processes):
        recorders = begin(processes)
        processes[failing].tell(OwnError("burnt"))

        expected = Failure((failing,), "failed: OwnError: burnt")
        others = [k for k in range(SIZE) if k != failing]
        assert {recorders[k].await_failure(PATIENCE) for k in others} == {expected}
        for k in others:
            processes[k].tell(OwnError(f"heard by {k}"))
        assert all(
            max(each.values(), default=0) == 1
            for each in sent(network, MessageCode.FAILURE).values()
            if each
        )
        run_step(processes)


def test_all_that_fail_at_once_hear_of_the_first() -> None:
    with offices(SIZE, SILENT) as (_, processes):
        begin(processes)
        with ThreadPoolExecutor(SIZE) as pool:
            list(pool.map(lambda office: office.tell(OwnError("all")), processes))
        run_step(processes)

        assert {office.ledger.failed for office in processes} == {1}


@pytest.mark.parametrize("lost", [0, INNER, SIZE - 1])
def test_process_that_dies_is_named_by_all(lost: int) -> None:
    with offices(SIZE, SILENT) as (network, processes):
        run_step(processes)
        recorders = begin(processes)
        network.close(lost)

        for rank in {*range(SIZE)} - {lost}:
            failure = recorders[rank].await_failure(PATIENCE)
            assert failure is not None
            assert failure.ranks == (lost,)
            assert failure.how.startswith("is lost: closed")


def test_inner_process_that_is_stopped_is_named_by_all() -> None:
    """Its parent tells the rest, and its children those below them."""
    with offices(SIZE, timedelta(seconds=4)) as (network, processes):
        recorders = begin(processes)
        # Nobody is connected beside the tree.
        assert all(len([*office.links]) == len(office.links.near) for office in processes)
        network.stopped.add(INNER)

        for rank in {*range(SIZE)} - {INNER}:
            failure = recorders[rank].await_failure(PATIENCE)
            assert failure is not None
            assert failure.ranks == (INNER,)
            assert failure.how.startswith("is lost: nothing was heard for 4 s")


def test_one_that_ends_is_known_to_all() -> None:
    with offices(SIZE, SILENT) as (_, processes):
        for office in processes:
            office.listen()
        processes[-1].close()

        ended = Failure((SIZE - 1,), "has ended")
        for office in processes[:-1]:
            office.failure(0.0)
            assert awaited_absence(office) == ended


def awaited_absence(office: Office) -> Failure | None:
    for _ in range(1000):
        if (found := office.absence()) is not None:
            return found
        office.failure(0.01)
    return None


def test_requests_reach_all() -> None:
    with offices(SIZE, timedelta(seconds=30)) as (_, processes):
        for office in processes:
            office.listen()
        processes[-1].requests.ask("stop")
        due: list[list[str]] = []
        for _ in range(1000):
            processes[0].failure(0.01)
            if all("stop" in office.requests.to_children() for office in processes):
                break
        for office in processes:
            office.requests.end_step()
        for office in processes:
            while (found := office.requests.due(alone=False)) is None:
                office.failure(0.01)
            due.append(found)

        assert due == [["stop"]] * SIZE


@pytest.mark.parametrize("size", [4, 16, 256, 1024])
def test_connections_by_count(size: int) -> None:
    """With outputs to all, and a chain: those of the pipeline's office, and those of a group."""
    first, last = Tree(size), Tree(size, size - 1)
    for rank in range(size):
        chain = {k for k in (rank - 1, rank + 1) if 0 <= k < size}
        own = {*first.neighbours(rank), *last.neighbours(rank)} | chain
        assert len(own) <= MOST_LINKS
        assert len(own) + len(first.neighbours(rank)) <= 21
    assert first.depth <= 4
