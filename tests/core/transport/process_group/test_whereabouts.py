"""Processes that wait for one another, and for different things, are told from those that wait."""

import json
from collections.abc import Sequence

import pytest

from lightning_gpipe.core.transport.process_group.tree import Tree
from lightning_gpipe.core.transport.process_group.whereabouts import (
    OBSERVED,
    OwnWhereabouts,
    Waits,
    Whereabouts,
    ranges_of,
    users_line,
)

BEATS = 10  # more than it takes


def waits(group: str, number: int, purpose: str = "a vote", **begun: int) -> Whereabouts:
    begun = {"save": 0, "batch": 0, **begun, group: number}
    return Whereabouts("fit.py:3", purpose, group, number, [[0, 2]], begun)


UNKNOWN = Whereabouts(purpose="broadcast of torch.distributed", begun={"save": 1, "batch": 4})
COMPUTES = Whereabouts("fit.py:9", begun={"save": 1, "batch": 4})


def tell(tree: Tree, processes: list[Waits], present: Sequence[Whereabouts]) -> None:
    """Let all processes tell once what they do, those that are far from the root first."""
    for rank in reversed(range(tree.size)):
        processes[rank].observe(present[rank])
        if (parent := tree.parent(rank)) is not None:
            processes[parent].hear_child(rank, processes[rank].to_parent())
    for rank in range(tree.size):
        for child in tree.children(rank):
            processes[child].hear_parent(processes[rank].to_children())


def in_vain(*present: Whereabouts, beats: int = BEATS, fan_out: int = 8) -> str:
    """What all know of one another's waits after some beats."""
    tree = Tree(len(present), fan_out=fan_out)
    processes = [Waits(range(tree.size), tree, rank) for rank in range(tree.size)]
    for _ in range(beats):
        tell(tree, processes, present)
        processes[0].in_vain()
    tell(tree, processes, present)
    (found,) = {each.in_vain() for each in processes}
    return found


@pytest.mark.parametrize(
    "present",
    [
        pytest.param([waits("save", 2, batch=4), waits("save", 2, batch=4)], id="the same"),
        pytest.param([waits("save", 2, batch=4), COMPUTES], id="one computes"),
        pytest.param([waits("save", 2, batch=4), waits("batch", 5, save=2)], id="one was there"),
        pytest.param([UNKNOWN, UNKNOWN], id="both in a collective"),
        pytest.param([UNKNOWN, waits("save", 2), COMPUTES], id="perhaps for the third"),
    ],
)
def test_waits_that_end(present: list[Whereabouts]) -> None:
    assert in_vain(*present) == ""


@pytest.mark.parametrize(
    "present, named",
    [
        ([waits("save", 2, batch=4), waits("batch", 5, save=1)], [0, 1]),
        ([waits("save", 2, batch=4), waits("save", 2, "a batch", batch=4)], [0, 1]),
        ([waits("save", 2, batch=4), UNKNOWN], [0, 1]),
        ([waits("save", 2, batch=4), waits("batch", 5, save=1), COMPUTES], [0, 1]),
        (
            [waits("save", 2), waits("batch", 5, save=1), waits("save", 2, batch=4)],
            [0, 1, 2],
        ),
    ],
)
def test_waits_in_vain(present: list[Whereabouts], named: list[int]) -> None:
    message = in_vain(*present)

    assert in_vain(*present, fan_out=1) == message
    assert [rank for rank in range(len(present)) if f"rank {rank} waits for" in message] == named
    assert in_vain(*present, beats=2) == "", "what is on its way may still come"


def test_a_process_that_moves_is_not_stuck() -> None:
    tree = Tree(2)
    processes = [Waits(range(2), tree, rank) for rank in range(2)]
    for k in range(BEATS):
        tell(tree, processes, [waits("save", 2 + k, batch=4), waits("batch", 5, save=1)])

    assert processes[0].in_vain() == ""


def test_all_know_what_few_of_many_do() -> None:
    tree = Tree(100)
    ranks = range(1000, 1100)
    processes = [Waits(ranks, tree, rank) for rank in range(100)]
    present = [waits("save", 2)] * 100
    present[77] = COMPUTES

    for _ in range(BEATS):
        tell(tree, processes, present)

    assert OBSERVED[1077].line == COMPUTES.line
    assert len([rank for rank in ranks if rank in OBSERVED]) == 1 + 8
    assert max(len(json.dumps(each.to_parent())) for each in processes) < 1000
    OBSERVED.clear()


def test_ranges_of_ranks() -> None:
    assert ranges_of([]) == []
    assert ranges_of([0, 1, 2, 5, 7, 8]) == [[0, 2], [5, 5], [7, 8]]


def test_own_whereabouts_are_those_of_the_innermost_operation() -> None:
    own = OwnWhereabouts()

    with own.within("outer", 3, [0, 1], "a backward"):
        with own.within("inner", 7, [0], "a vote"):
            assert own.now().purpose == "a vote"
        assert (own.now().group, own.now().number) == ("outer", 3)

    assert own.now().purpose == ""
    assert own.now().begun == {"outer": 3, "inner": 7}


def test_line_is_the_users() -> None:
    assert users_line().startswith(__file__)
