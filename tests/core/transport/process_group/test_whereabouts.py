"""Processes that wait for one another, and for different things, are told from those that wait."""

import json
from dataclasses import asdict
from typing import Any

import pytest

from lightning_gpipe.core.transport.process_group.whereabouts import (
    OwnWhereabouts,
    Waits,
    Whereabouts,
    users_line,
)

BEATS = 10  # more than it takes


def waits(group: str, number: int, purpose: str = "a vote", **begun: int) -> Whereabouts:
    begun = {"save": 0, "batch": 0, **begun, group: number}
    return Whereabouts("fit.py:3", purpose, group, number, [0, 1, 2], begun)


UNKNOWN = Whereabouts(purpose="broadcast of torch.distributed", begun={"save": 1, "batch": 4})
COMPUTES = Whereabouts("fit.py:9", begun={"save": 1, "batch": 4})


def in_vain(*present: Whereabouts, beats: int = BEATS) -> str:
    heard = Waits(range(len(present)))
    for _ in range(beats):
        for rank, each in enumerate(present):
            heard.hear(rank, json.dumps(asdict(each)))
    return heard.in_vain()


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

    assert [rank for rank in range(len(present)) if f"rank {rank} waits for" in message] == named
    assert in_vain(*present, beats=2) == "", "what is on its way may still come"


def test_a_process_that_moves_is_not_stuck() -> None:
    heard = Waits(range(2))
    for k in range(BEATS):
        heard.hear(0, json.dumps(asdict(waits("save", 2 + k, batch=4))))
        heard.hear(1, json.dumps(asdict(waits("batch", 5, save=1))))

    assert heard.in_vain() == ""


def decoded(own: OwnWhereabouts) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(own.encode({}))
    return values


def test_own_whereabouts_are_those_of_the_innermost_operation() -> None:
    own = OwnWhereabouts()

    with own.within("outer", 3, [0, 1], "a backward"):
        with own.within("inner", 7, [0], "a vote"):
            assert decoded(own)["purpose"] == "a vote"
        assert (decoded(own)["group"], decoded(own)["number"]) == ("outer", 3)

    assert decoded(own)["purpose"] == ""
    assert decoded(own)["begun"] == {"outer": 3, "inner": 7}


def test_line_is_the_users() -> None:
    assert users_line().startswith(__file__)
