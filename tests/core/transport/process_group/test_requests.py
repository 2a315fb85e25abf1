"""Requests are fulfilled after the same step by all, whenever each has heard of them."""

import random

import pytest

from lightning_gpipe.core.transport.process_group.requests import Requests


def beat(processes: list[Requests], rank: int) -> None:
    """Let one process tell all others."""
    told = processes[rank].tell()
    for other in processes:
        if other is not processes[rank]:
            other.hear(rank, told)


def test_step_without_a_request() -> None:
    (process,) = processes = [Requests(0, 1)]
    beat(processes, 0)
    process.end_step()

    assert process.due([]) == []


def test_one_that_has_heard_waits_for_the_answers_of_all() -> None:
    processes = [Requests(rank, 2) for rank in range(2)]
    one, two = processes
    one.ask("stop")
    beat(processes, 0)
    for each in processes:
        each.end_step()

    assert one.due([]) is None, "it does not know where the other waits"
    assert two.due([]) == [], "it has not told where it waits itself"

    beat(processes, 1)
    assert one.due([]) == [], "the other is in the next step"
    for each in processes:
        each.end_step()
        assert each.due([]) == ["stop"]


def test_one_that_has_ended_is_not_awaited() -> None:
    one = Requests(0, 2)
    one.ask("stop")
    one.tell()
    one.end_step()

    assert one.due([1]) == ["stop"]


@pytest.mark.parametrize("seed", range(100))
def test_all_fulfil_after_the_same_step(seed: int) -> None:
    """Steps, beats and requests in a drawn order; no process is more than a step ahead."""
    draw = random.Random(seed)
    size = draw.choice([2, 3, 5])
    processes = [Requests(rank, size) for rank in range(size)]
    steps = [0] * size
    waits = [False] * size
    fulfilled: list[list[tuple[int, str]]] = [[] for _ in processes]
    asked = {"stop": 0, "save": 0}
    for k in range(2000):
        rank = draw.randrange(size)
        process = processes[rank]
        if draw.random() < 0.4:
            beat(processes, rank)
        if k < 1500 and draw.random() < 0.005:
            request = draw.choice(list(asked))
            process.ask(request)
            asked[request] += 1
        if not waits[rank] and steps[rank] == min(steps):
            process.end_step()
            steps[rank] += 1
            waits[rank] = True
        if waits[rank] and (due := process.due([])) is not None:
            fulfilled[rank] += [(steps[rank], request) for request in due]
            waits[rank] = False

    last = min(steps)
    first, *others = ([each for each in row if each[0] < last] for row in fulfilled)
    assert all(row == first for row in others)
    for request, times in asked.items():
        assert bool(times) == any(name == request for _, name in first)


def test_request_can_be_made_again() -> None:
    processes = [Requests(rank, 2) for rank in range(2)]
    for _ in range(2):
        processes[1].ask("save")
        for rank in (1, 0, 1):
            beat(processes, rank)
        for each in processes:
            each.end_step()
            assert each.due([]) == ["save"]
        for rank in (0, 1):
            beat(processes, rank)
            processes[rank].end_step()
        assert [each.due([]) for each in processes] == [[], []]
