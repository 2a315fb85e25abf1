from typing import Any

import pytest

from lightning_gpipe.core.schedules import ActivationCheckpointing
from lightning_gpipe.core.schedules.recompute import (
    check_activation_checkpointing,
    held_at_once,
    recomputed_by_stage,
)


@pytest.mark.parametrize(
    "mode, counts",  # for m = 1, 2 and 4 micro-batches
    [
        ("always", [1, 2, 4]),
        ("except_last", [0, 1, 3]),
        ("never", [0, 0, 0]),
        (0, [0, 0, 0]),
        (2, [1, 2, 2]),
        (9, [1, 2, 4]),
    ],
)
def test_mode_counts_the_recomputed(mode: ActivationCheckpointing, counts: list[int]) -> None:
    assert [recomputed_by_stage(mode, m, 3) for m in (1, 2, 4)] == [(k,) * 3 for k in counts]


def test_number_for_each_stage() -> None:
    assert recomputed_by_stage([9, 1, 0], m=4, n=3) == (4, 1, 0)


@pytest.mark.parametrize("k, held", [(0, 4), (1, 3), (3, 1), (4, 1)])
def test_activations_held_at_once(k: int, held: int) -> None:
    assert held_at_once(4, k) == held


@pytest.mark.parametrize("mode", ["always", "except_last", "never", 0, 3, [3, 0], (1, 2)])
def test_known_mode(mode: ActivationCheckpointing) -> None:
    check_activation_checkpointing(mode)


@pytest.mark.parametrize("mode", ["sometimes", "", "Always", -1, [], [1, -1]])
def test_unknown_mode(mode: Any) -> None:
    with pytest.raises(ValueError, match="activation_checkpointing must be one of") as error:
        check_activation_checkpointing(mode)

    assert "'always', 'except_last', 'never', a number" in str(error.value)
    assert f"got {mode!r}" in str(error.value)


@pytest.mark.parametrize("mode", [True, None, 1.0, ["always"], [1, True], [[1]]])
def test_mode_of_the_wrong_type(mode: Any) -> None:
    with pytest.raises(TypeError, match="activation_checkpointing must be one of") as error:
        check_activation_checkpointing(mode)

    assert f"got {mode!r}" in str(error.value)


def test_list_for_another_number_of_stages() -> None:
    with pytest.raises(ValueError, match=r"for each stage: got 2 numbers, \[1, 2\], for 1 stage"):
        check_activation_checkpointing([1, 2], stages=1)
