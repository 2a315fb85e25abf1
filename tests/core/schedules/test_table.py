"""The schedules of the table: their names, pictures, bubbles and memory.

Here are also the tests of ``caller_row``, ``zero_bubble_v`` and ``v_shaped``.
"""

from textwrap import dedent
from typing import cast, get_args

import pytest

from lightning_gpipe.core.schedules.action import Action, Kind
from lightning_gpipe.core.schedules.placement import folded, looped
from lightning_gpipe.core.schedules.schedule import Schedule
from lightning_gpipe.core.schedules.table import (
    SCHEDULES,
    ByMicroBatch,
    ScheduleDefinition,
    ScheduleName,
    check_by_micro_batch,
    check_schedule,
    fill_drain,
    is_by_micro_batch,
    schedule_for,
)
from lightning_gpipe.core.schedules.zero_bubble_v import zero_bubble_v_rows
from tests.support.live_activations import peak_live
from tests.support.placements import one_each


def drawn(picture: str) -> str:
    return dedent(picture).lstrip("\n")


def test_names_in_types_are_those_of_the_table() -> None:
    assert get_args(ScheduleName) == tuple(SCHEDULES)
    assert get_args(ByMicroBatch) == tuple(
        name for name, definition in SCHEDULES.items() if definition.by_micro_batch
    )


def test_new_schedule_is_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here without a check, so that it runs with any placement and number of micro-batches."""
    entry = ScheduleDefinition(rows=zero_bubble_v_rows, always_split=True)
    monkeypatch.setitem(cast(dict[str, ScheduleDefinition], SCHEDULES), "new", entry)

    check_schedule("new")
    check_by_micro_batch("new", 3, (0, 1, 1, 0))
    with pytest.raises(ValueError, match="'v_min', 'new', or 'auto': got 'newer'"):
        check_schedule("newer")
    assert is_by_micro_batch("new")
    assert schedule_for("new", 3, (0, 1, 1, 0)) == schedule_for("zero_bubble_v", 3, (0, 1, 1, 0))


def test_one_forward_one_backward() -> None:
    assert str(schedule_for("1f1b", 4, one_each(3))) == drawn("""
        stage 0 | F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
        stage 1 | .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .
        stage 2 | .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .
        caller  | P0 P1 P2 L0 P3 L1 L2 L3 B0 B1 B2 B3
    """)


def test_one_forward_one_backward_with_recomputation_and_split_backwards() -> None:
    assert str(schedule_for("1f1b", 3, one_each(2), recomputed=1, split=True)) == drawn("""
        stage 0 | F0 F1 R0 .  B0 W0 F2 B1 W1 .  B2 W2
        stage 1 | .  F0 R0 B0 W0 F1 B1 W1 F2 B2 W2 .
        caller  | P0 P1 L0 P2 L1 L2 B0 B1 B2
    """)


def test_interleaved() -> None:
    assert str(schedule_for("1f1b", 4, looped(4, 2))) == drawn("""
        stage 0 (worker 0) | F0 F1 .  .  F2 .  F3 .  .  B0 .  B1 .  .  .  .  B2 B3
        stage 1 (worker 1) | .  F0 F1 .  .  .  .  F2 B0 F3 B1 .  .  .  .  B2 B3 .
        stage 2 (worker 0) | .  .  F0 F1 .  B0 .  B1 F2 .  F3 .  .  B2 .  B3 .  .
        stage 3 (worker 1) | .  .  .  F0 B0 F1 B1 .  .  .  .  F2 B2 F3 B3 .  .  .
        caller             | P0 P1 P2 L0 P3 L1 L2 L3 B0 B1 B2 B3
    """)


def test_zero_bubble() -> None:
    assert str(schedule_for("zero_bubble", 4, one_each(3))) == drawn("""
        stage 0 | F0 F1 F2 .  .  B0 W0 F3 B1 W1 B2 W2 B3 W3
        stage 1 | .  F0 F1 .  B0 F2 B1 W0 F3 B2 W1 B3 W2 W3
        stage 2 | .  .  F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3
        caller  | P0 P1 P2 L0 P3 L1 L2 L3 B0 B1 B2 B3
    """)


def test_zero_bubble_v() -> None:
    assert str(schedule_for("zero_bubble_v", 3, folded(4, 2))) == drawn("""
        stage 0 (worker 0) | F0 F1 F2 .  .  .  .  .  .  B0 W0 .  .  B1 .  B2 W1 W2 .
        stage 1 (worker 1) | .  F0 .  F1 .  .  .  F2 B0 W0 .  .  B1 .  B2 .  W1 .  W2
        stage 2 (worker 1) | .  .  F0 .  F1 B0 W0 .  .  .  F2 B1 .  B2 .  W1 .  W2 .
        stage 3 (worker 0) | .  .  .  F0 B0 W0 F1 B1 W1 .  .  F2 B2 .  W2 .  .  .  .
        caller             | P0 P1 P2 L0 L1 L2 B0 B1 B2
    """)


@pytest.mark.parametrize("workers", range(1, 6))
@pytest.mark.parametrize("m", range(1, 8))
def test_zero_bubble_v_holds_no_more_than_a_whole_stage_of_each_micro_batch(
    m: int, workers: int
) -> None:
    for recomputed in (0, 1, m):
        placement = folded(2 * workers, workers)
        schedule = schedule_for("zero_bubble_v", m, placement, recomputed=recomputed)

        assert max(peak_live(schedule)) <= min(2 * m, 2 * workers)
        assert len(schedule.simulation.end) == m * (6 * workers + 3) + 2 * workers * recomputed


@pytest.mark.parametrize("workers", [2, 4, 8])
def test_zero_bubble_v_waits_little_where_backwards_take_longer(workers: int) -> None:
    """Where each action ran as soon as it could, workers waited for a backward in each round.

    With backwards a fifth longer, and four micro-batches for each worker, the bubble was 7.6 to
    13 %.
    """
    schedule = schedule_for("zero_bubble_v", 4 * workers, folded(2 * workers, workers))

    cost = {Kind.FORWARD: 1.0, Kind.BACKWARD: 1.2, Kind.WEIGHTS: 1.0}
    on_stages = range(schedule.n)
    simulation = schedule.simulate(lambda a: cost[a.kind] if a.j in on_stages else 0.0)

    assert simulation.bubble < 0.042


def test_v_half() -> None:
    assert str(schedule_for("v_half", 3, folded(4, 2))) == drawn("""
        stage 0 (worker 0) | F0 .  .  .  F1 .  .  .  F2 .  B0 .  .  .  W0 .  B1 .  .  W1 .  B2 W2
        stage 1 (worker 1) | .  F0 .  .  .  F1 .  .  .  B0 W0 F2 .  .  .  B1 W1 .  .  .  B2 W2 .
        stage 2 (worker 1) | .  .  F0 .  .  .  F1 B0 W0 .  .  .  F2 B1 W1 .  .  .  B2 W2 .  .  .
        stage 3 (worker 0) | .  .  .  F0 .  B0 W0 F1 .  .  .  B1 W1 F2 .  .  .  B2 W2 .  .  .  .
        caller             | P0 P1 L0 P2 L1 L2 B0 B1 B2
    """)


def test_v_min() -> None:
    assert str(schedule_for("v_min", 3, folded(4, 2))) == drawn("""
        stage 0 (worker 0) | F0 .  .  .  .  .  F1 B0 W0 .  .  .  F2 B1 W1 .  .  .  .  B2 W2
        stage 1 (worker 1) | .  F0 .  .  .  .  B0 F1 .  .  W0 .  B1 F2 .  .  W1 .  B2 .  W2
        stage 2 (worker 1) | .  .  F0 .  .  B0 .  .  F1 W0 .  B1 .  .  F2 W1 .  B2 .  W2 .
        stage 3 (worker 0) | .  .  .  F0 B0 W0 .  .  .  F1 B1 W1 .  .  .  F2 B2 W2 .  .  .
        caller             | P0 L0 P1 L1 B0 P2 L2 B1 B2
    """)


@pytest.mark.parametrize("workers", [*range(1, 14), 64])
def test_memory_of_v_shapes(workers: int) -> None:
    """In stages of 1F1B, which holds one micro-batch for each device; of halves, so in twice."""
    m, placement = 2 * workers + 3, folded(2 * workers, workers)

    def most(name: ScheduleName) -> float:
        schedule = schedule_for(name, m, placement, recomputed=workers)
        assert len(schedule.simulation.end) == m * (6 * workers + 3) + 2 * workers * workers
        return max(peak_live(schedule_for(name, m, placement))) / 2

    assert most("v_half") <= workers / 2 + 1
    assert most("v_min") <= workers / 3 + 4 / 3


def test_caller_goes_on_to_what_came_before_the_call_when_it_need_not_wait() -> None:
    lines = str(schedule_for("1f1b", 6, one_each(2))).splitlines()

    assert lines[-1] == "caller  | P0 P1 L0 P2 L1 P3 L2 B0 P4 L3 B1 P5 L4 B2 L5 B3 B4 B5"


UNITS = {Kind.FORWARD: 1.0, Kind.RECOMPUTE: 1.0, Kind.BACKWARD: 1.0, Kind.WEIGHTS: 1.0}


def bubble(schedule: Schedule) -> float:
    """In per cent, where F, B and W take equally long: a whole backward is twice as long as F."""
    split = any(action.kind is Kind.WEIGHTS for row in schedule.rows for action in row)
    units = UNITS if split else UNITS | {Kind.BACKWARD: 2.0}
    simulation = schedule.simulate(lambda action: units[action.kind] if on_a_stage(action) else 0)
    return 100 * simulation.bubble


def on_a_stage(action: Action) -> bool:
    return action.j >= 0 and action.kind in UNITS


SIZES = [(4, 8), (8, 16), (8, 32)]
BUBBLES = {
    "fill-drain": (27.3, 30.4, 17.9),
    "1F1B": (27.3, 30.4, 17.9),
    "fill-drain, W": (20.0, 22.6, 12.7),
    "1F1B, W": (20.0, 22.6, 12.7),
    "looped fill-drain": (15.8, 17.9, 9.9),
    "interleaved": (15.8, 17.9, 9.9),
    "looped fill-drain, W": (11.1, 12.7, 6.8),
    "interleaved, W": (11.1, 12.7, 6.8),
    "zero bubble": (11.1, 12.7, 6.8),
    "zero bubble, V": (5.9, 6.8, 3.5),
    "half, V": (20.0, 21.3, 11.9),
    "min, V": (18.6, 22.0, 12.3),
    "except the last": (22.5, 25.0, 14.2),
    "except the last, W": (16.2, 18.2, 9.9),
}


def of_name(name: str, n: int, m: int) -> Schedule:
    kind, _, weights = name.partition(", ")
    split, two = bool(weights), looped(2 * n, n)
    match kind:
        case "fill-drain":
            return fill_drain(m, one_each(n), split=split)
        case "looped fill-drain":
            return fill_drain(m, two, split=split)
        case "except the last":
            return fill_drain(m, one_each(n), recomputed=m - 1, split=split)
        case "1F1B":
            return schedule_for("1f1b", m, one_each(n), split=split)
        case "interleaved":
            return schedule_for("1f1b", m, two, split=split)
        case "zero bubble" if weights:
            return schedule_for("zero_bubble_v", m, folded(2 * n, n))
        case "half":
            return schedule_for("v_half", m, folded(2 * n, n))
        case "min":
            return schedule_for("v_min", m, folded(2 * n, n))
    return schedule_for("zero_bubble", m, one_each(n))


@pytest.mark.parametrize("name", BUBBLES)
def test_bubble(name: str) -> None:
    found = [bubble(of_name(name, n, m)) for n, m in SIZES]

    assert found == pytest.approx(BUBBLES[name], abs=0.05)


@pytest.mark.parametrize("n, m", SIZES)
def test_most_alive(n: int, m: int) -> None:
    def alive(name: str) -> tuple[int, ...]:
        return peak_live(of_name(name, n, m))

    assert alive("fill-drain") == (m,) * n
    assert alive("1F1B") == alive("1F1B, W") == tuple(n - j for j in range(n))
    assert alive("zero bubble") == (n,) * n
    assert alive("except the last") == (1,) * n
    # Of two stages each, so of halves.
    assert alive("zero bubble, V") == (2 * n,) * n
    assert max(alive("half, V")) == n + 2
    assert max(alive("min, V")) == {4: 4, 8: 8}[n]
    assert alive("interleaved") == tuple(2 * (n - 1 - w) + n + 1 for w in range(n))
    assert alive("looped fill-drain") == (2 * m,) * n


@pytest.mark.parametrize("n", range(1, 6))
@pytest.mark.parametrize("m", range(1, 6))
def test_one_forward_one_backward_holds_no_more_than_the_stages_after_it(m: int, n: int) -> None:
    assert peak_live(schedule_for("1f1b", m, one_each(n))) == tuple(min(m, n - j) for j in range(n))


def test_interleaved_stages_need_whole_groups() -> None:
    with pytest.raises(ValueError, match="got 9 micro-batches on 4 devices. Write chunks=8 or ch"):
        check_by_micro_batch("1f1b", 9, looped(8, 4))
    with pytest.raises(ValueError, match="got 3 micro-batches on 4 devices. Write chunks=4, or"):
        check_by_micro_batch("1f1b", 3, looped(8, 4))


def test_short_mini_batch_runs_where_whole_groups_would() -> None:
    placement = looped(4, 2)

    assert str(schedule_for("1f1b", 1, placement)) == drawn("""
        stage 0 (worker 0) | F0 .  .  .  .  .  .  B0
        stage 1 (worker 1) | .  F0 .  .  .  .  B0 .
        stage 2 (worker 0) | .  .  F0 .  .  B0 .  .
        stage 3 (worker 1) | .  .  .  F0 B0 .  .  .
        caller             | P0 L0 B0
    """)


def test_settings_that_cannot_be() -> None:
    check_by_micro_batch("1f1b", 8, looped(8, 4))
    check_by_micro_batch("zero_bubble", 3, one_each(4))

    with pytest.raises(ValueError, match="must be one of '1f1b', 'zero_bubble', .*: got 'gpipe'"):
        check_by_micro_batch("gpipe", 8, one_each(4))
    with pytest.raises(ValueError, match="a device for each stage: got 8 stages on 4 devices"):
        check_by_micro_batch("zero_bubble", 8, looped(8, 4))
    with pytest.raises(ValueError, match=r"stage j on device j mod 2: got .* \[0, 1, 1, 0\]"):
        check_by_micro_batch("1f1b", 8, (0, 1, 1, 0))
    check_by_micro_batch("zero_bubble_v", 3, (0, 1, 1, 0))
    with pytest.raises(ValueError, match=r"in order, and back: got .* \[0, 1, 0, 1\]"):
        check_by_micro_batch("zero_bubble_v", 3, (0, 1, 0, 1))
    with pytest.raises(ValueError, match="must be two on each: got 3 stages on 3 devices"):
        check_by_micro_batch("zero_bubble_v", 3, one_each(3))
