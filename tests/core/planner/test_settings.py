"""The numbers that a plan tries, and the candidates that it shows beside the best one."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from lightning_gpipe.core.planner.settings import (
    PlannedSettings,
    doubled,
    fewer_stages,
    near,
)
from lightning_gpipe.core.schedules import ScheduleKind

SPLIT = ScheduleKind("1f1b", split=True)


@pytest.mark.parametrize(
    "recomputed, expected",
    [((0, 0), "never"), ((3, 3), 3), ((4, 4), "always"), ((4, 0), [4, 0])],
)
def test_recomputed_micro_batches_as_the_users_argument(
    recomputed: tuple[int, ...], expected: Any
) -> None:
    assert PlannedSettings(2, 4, recomputed).activation_checkpointing == expected


@pytest.mark.parametrize(
    "settings, text",
    [
        (
            PlannedSettings(2, 4, (0, 0), balance=(3, 1)),
            "balance=[3, 1], chunks=4, activation_checkpointing='never'",
        ),
        (
            PlannedSettings(2, 4, (1, 1), SPLIT, (3, 1)),
            "balance=[3, 1], chunks=4, activation_checkpointing=1, schedule='1f1b', "
            "split_backward=True",
        ),
        (
            PlannedSettings(65, 4, (4,) * 65, balance=(2,) * 65),
            "balance=[2, 2, 2, ... of 65], chunks=4, activation_checkpointing='always'",
        ),
    ],
)
def test_settings_are_shown_as_arguments(settings: PlannedSettings, text: str) -> None:
    assert str(settings) == text


def test_candidates_near_the_best() -> None:
    """Those of another schedule are not among them, though they are closer."""
    same = [PlannedSettings(n, m) for n, m in product((1, 2, 4), (2, 4, 8))]
    others = [PlannedSettings(3, 4, order=SPLIT)]

    found = list(near(PlannedSettings(2, 4, (2, 1)), same + others))

    beside = [PlannedSettings(n, m) for n, m in ((1, 4), (4, 4), (2, 2), (2, 8))]
    assert found == [*beside, PlannedSettings(2, 4).alike(0), PlannedSettings(2, 4).alike(4)]


def test_candidates_near_the_best_if_the_recomputation_is_given() -> None:
    given = [PlannedSettings(n, 4).alike(3) for n in (1, 2, 4)]

    assert list(near(given[1], given)) == [given[0], given[2]]


def test_numbers_of_stages() -> None:
    assert fewer_stages(3) == [1, 2, 3]
    assert fewer_stages(24) == [1, 3, 6, 12, 24]


def test_numbers_of_micro_batches() -> None:
    assert doubled(2, 9) == [2, 4, 8]
    assert doubled(4, 3) == [4], "one number at least"
