"""Requests are fulfilled after the same step by all, whenever each has heard of them."""

import random

import pytest

from lightning_gpipe.core.transport.process_group.requests import Requests
from lightning_gpipe.core.transport.process_group.tree import Tree


def connected(size: int, fan_out: int = 8) -> tuple[Tree, list[Requests]]:
    tree = Tree(size, fan_out=fan_out)
    return tree, [Requests(tree, rank) for rank in range(size)]


def beat(tree: Tree, processes: list[Requests], rank: int) -> bool:
    """Let one process tell its neighbours; True if one of them learns something."""
    parent, own = tree.parent(rank), processes[rank]
    news = parent is not None and processes[parent].hear_child(rank, own.to_parent())
    heard = [processes[child].hear_parent(own.to_children()) for child in tree.children(rank)]
    return any([news, *heard])


def test_step_without_a_request() -> None:
    tree, (process,) = connected(1)
    beat(tree, [process], 0)
    process.end_step()

    assert process.due(alone=False) == []


def test_one_that_has_heard_waits_for_the_answers_of_all() -> None:
    tree, processes = connected(2)
    one, two = processes
    one.ask("stop")
    beat(tree, processes, 0)
    for each in processes:
        each.end_step()

    assert one.due(alone=False) is None, "it does not know where the other waits"
    assert two.due(alone=False) == [], "it has not told where it waits itself"

    beat(tree, processes, 1)
    beat(tree, processes, 0)
    assert one.due(alone=False) == [], "the other is in the next step"
    for each in processes:
        each.end_step()
        assert each.due(alone=False) == ["stop"]


def test_one_that_has_ended_is_not_awaited() -> None:
    _, (one, _) = connected(2)
    one.ask("stop")
    one.to_parent()
    one.end_step()

    assert one.due(alone=True) == ["stop"]


@pytest.mark.parametrize("seed", range(100))
def test_all_fulfil_after_the_same_step(seed: int) -> None:
    """Steps, beats and requests in a drawn order; no process is more than a step ahead."""
    draw = random.Random(seed)
    size = draw.choice([2, 3, 5, 8])
    tree, processes = connected(size, draw.choice([1, 2, 8]))
    steps = [0] * size
    waits = [False] * size
    fulfilled: list[list[tuple[int, str]]] = [[] for _ in processes]
    asked = {"stop": 0, "save": 0}
    for k in range(2000):
        rank = draw.randrange(size)
        process = processes[rank]
        if draw.random() < 0.4:
            beat(tree, processes, rank)
        if k < 1500 and draw.random() < 0.005:
            request = draw.choice(list(asked))
            process.ask(request)
            asked[request] += 1
        if not waits[rank] and steps[rank] == min(steps):
            process.end_step()
            steps[rank] += 1
            waits[rank] = True
        if waits[rank] and (due := process.due(alone=False)) is not None:
            fulfilled[rank] += [(steps[rank], request) for request in due]
            waits[rank] = False

    last = min(steps)
    first, *others = ([each for each in row if each[0] < last] for row in fulfilled)
    assert all(row == first for row in others)
    for request, times in asked.items():
        assert bool(times) == any(name == request for _, name in first)


def test_request_can_be_made_again() -> None:
    tree, processes = connected(2)
    for _ in range(2):
        processes[1].ask("save")
        for rank in (1, 0, 1, 0):
            beat(tree, processes, rank)
        for each in processes:
            each.end_step()
            assert each.due(alone=False) == ["save"]
        for rank in (0, 1):
            beat(tree, processes, rank)
            processes[rank].end_step()
        assert [each.due(alone=False) for each in processes] == [[], []]


def test_what_is_told_again_is_no_news() -> None:
    """Each who learns something tells it at once, until nobody learns anything."""
    tree, processes = connected(5, fan_out=2)
    assert not any(beat(tree, processes, rank) for rank in range(5))
    processes[4].ask("stop")

    rounds = 0
    while sum(beat(tree, processes, rank) for rank in range(5)):
        rounds += 1

    assert 0 < rounds <= 4 * tree.depth
    for each in processes:
        each.end_step()
        assert each.due(alone=False) == ["stop"]
