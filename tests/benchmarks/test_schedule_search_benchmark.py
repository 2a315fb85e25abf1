"""The times and bytes that ``benchmarks.schedule_search`` compares are those of the schedules."""

from __future__ import annotations

from random import Random

import pytest

from benchmarks.schedule_search import (
    PLACEMENTS,
    compare,
    drawn_costs,
    judged,
    schedules_with_names,
)
from lightning_gpipe.core.schedules import looped, schedule_for


def test_judgement_by_hand() -> None:
    costs = drawn_costs(Random(0), 1)
    whole, split = (costs[each][0] for each in (False, True))

    for name, cost in (("1f1b", whole), ("zero_bubble", split)):
        found, most = judged(schedule_for(name, 3, (0,)), [cost])
        assert found == pytest.approx(3 * cost.time)
        assert most == pytest.approx(cost.saved)


def test_two_stages_hold_what_1f1b_holds() -> None:
    costs = drawn_costs(Random(1), 2)
    (_, most), *others = schedules_with_names(4, looped(2, 2), costs)

    assert most == pytest.approx(max(2 * costs[False][0].saved, costs[False][1].saved))
    assert len(others) == 3


@pytest.mark.parametrize("name", PLACEMENTS)
def test_comparison(name: str) -> None:
    placement, m = PLACEMENTS[name]

    found = compare(Random(2), m, placement, tries=100)

    assert 0 <= found.gain < 1
    assert found.seconds > 0
