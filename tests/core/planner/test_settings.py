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
    numbers_recomputed,
)
from lightning_gpipe.core.schedules import ScheduleKind

SPLIT = ScheduleKind("1f1b", split=True)


@pytest.mark.parametrize("recomputed, expected", [(0, "never"), (3, 3), (4, "always")])
def test_recomputed_micro_batches_as_the_users_argument(recomputed: int, expected: Any) -> None:
    assert PlannedSettings(2, 4, recomputed).activation_checkpointing == expected


@pytest.mark.parametrize(
    "settings, text",
    [
        (
            PlannedSettings(2, 4, 0, balance=(3, 1)),
            "balance=[3, 1], chunks=4, activation_checkpointing='never'",
        ),
        (
            PlannedSettings(2, 4, 1, SPLIT, (3, 1)),
            "balance=[3, 1], chunks=4, activation_checkpointing=1, schedule='1f1b', "
            "split_backward=True",
        ),
        (
            PlannedSettings(65, 4, 4, balance=(2,) * 65),
            "balance=[2, 2, 2, ... of 65], chunks=4, activation_checkpointing='always'",
        ),
    ],
)
def test_settings_are_shown_as_arguments(settings: PlannedSettings, text: str) -> None:
    assert str(settings) == text


def test_candidates_near_the_best() -> None:
    """Those of another schedule are not among them, though they are closer."""
    same = [PlannedSettings(n, m, k) for n, m in product((1, 2, 4), (2, 4, 8)) for k in (0, m // 2)]
    same += [PlannedSettings(n, m, m) for n, m in product((1, 2, 4), (2, 4, 8))]
    others = [PlannedSettings(3, 4, 2, SPLIT), PlannedSettings(2, 4, 3, SPLIT)]

    found = list(near(PlannedSettings(2, 4, 2), same + others))

    stages = [PlannedSettings(1, 4, 2), PlannedSettings(4, 4, 2)]
    chunks = [PlannedSettings(2, 2, 1), PlannedSettings(2, 8, 4)]
    assert found == [*stages, *chunks, PlannedSettings(2, 4, 0), PlannedSettings(2, 4, 4)]


def test_numbers_of_stages() -> None:
    assert fewer_stages(3) == [1, 2, 3]
    assert fewer_stages(24) == [1, 3, 6, 12, 24]


def test_numbers_of_micro_batches() -> None:
    assert doubled(2, 9) == [2, 4, 8]
    assert doubled(4, 3) == [4], "one number at least"


def test_numbers_of_recomputed_micro_batches() -> None:
    assert numbers_recomputed(3, None) == [0, 1, 2, 3]
    assert numbers_recomputed(16, None) == [0, 2, 4, 6, 8, 10, 12, 14, 15, 16]
    assert numbers_recomputed(16, "except_last") == [15]
