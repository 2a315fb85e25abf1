"""The parts of the idle time, where they are known by construction; and the benchmark runs."""

import time
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from benchmarks import bubble_audit
from benchmarks.harness import options
from benchmarks.harness.audit import PARTS, Audit, audit, typical
from benchmarks.harness.thread_clock import thread_clocks
from lightning_gpipe import GPipe
from lightning_gpipe.core.run.observe.clocks import HostClock
from lightning_gpipe.core.run.observe.timeline import Timeline
from lightning_gpipe.core.schedules import Action, Kind, fill_drain
from tests.support.placements import one_each

KINDS = {kind.letter: kind for kind in Kind}


def drawn(*rows: str, recomputed: int = 0) -> tuple[Timeline, dict[Action, float]]:
    """A timeline, and what computed in it, with one stage per row and one second per column.

    An action begins at its name and goes on computing while there are dashes, and waiting while
    there are dots; then comes the next, or ``_`` for none. ``|`` is a second in which the loss is
    computed.
    """
    found: dict[Action, list[int]] = {}
    computing: dict[Action, float] = {}
    for j, row in enumerate(rows):
        action = None
        for k, cell in enumerate(row.split()):
            if cell[0] in KINDS:
                action = Action(KINDS[cell[0]], int(cell[1:]), j)
                found[action], computing[action] = [k, k + 1], 1.0
            elif cell == "_":
                action = None
            elif action is not None and cell in ("--", ".."):
                found[action][1] = k + 1
                computing[action] += cell == "--"
    m = 1 + max(action.i for action in found)
    schedule = fill_drain(m, one_each(len(rows)), recomputed=recomputed)
    timeline = Timeline(schedule, [HostClock()] * len(rows))
    for action, (start, end) in found.items():
        timeline.records.append((action.j, action, float(start), float(end)))
    return timeline, computing


def assert_parts(found: Audit, expected: Mapping[str, list[float]]) -> None:
    """Compare parts, one number per worker; those not mentioned are zero."""
    for part in PARTS:
        values = [getattr(row, part) for row in found.rows]
        assert values == pytest.approx(expected.get(part, [0.0] * len(values))), part
    for row in found.rows:
        assert sum(getattr(row, part) for part in PARTS) == pytest.approx(row.idle)


def test_nothing_but_the_schedule() -> None:
    found = audit(
        *drawn(
            "F0 F1 F2 _  |  _  B2 B1 B0",
            "_  F0 F1 F2 |  B2 B1 B0 _",
        )
    )

    assert found.seconds == 8
    assert_parts(found, {"schedule": [1 / 4, 1 / 4]})


def test_recomputation_fills_the_wait() -> None:
    found = audit(
        *drawn(
            "F0 F1 _  |  R1 _  B1 R0 B0",
            "_  F0 F1 |  R1 B1 R0 B0 _",
            recomputed=2,
        )
    )

    assert_parts(found, {"schedule": [2 / 8, 2 / 8]})


def test_hand_over_that_takes_a_while() -> None:
    found = audit(
        *drawn(
            "F0 F1 F2 _  _  _",
            "_  _  _  F0 F1 F2",
        )
    )

    # Of six seconds instead of four, three are computed.
    assert_parts(found, {"schedule": [1 / 4, 1 / 4], "transfers": [1 / 4, 1 / 4]})
    assert [row.between for row in found.rows] == pytest.approx([0, 2 / 6])


def test_a_worker_that_begins_late_makes_the_next_one_wait() -> None:
    found = audit(
        *drawn(
            "F0 _  F1 _",
            "_  F0 _  F1",
        )
    )

    assert_parts(found, {"schedule": [1 / 3, 1 / 3], "transfers": [1 / 2 - 1 / 3] * 2})
    assert [row.between for row in found.rows] == pytest.approx([1 / 4, 0])


def test_one_stage_twice_as_slow() -> None:
    found = audit(
        *drawn(
            "F0 F1 F2 _  _  _  _",
            "_  F0 -- F1 -- F2 --",
        )
    )

    assert_parts(found, {"schedule": [1 / 4, 1 / 4], "imbalance": [4 / 7 - 1 / 4, 1 / 7 - 1 / 4]})


def test_one_action_twice_as_long() -> None:
    found = audit(
        *drawn(
            "F0 F1 -- _",
            "_  F0 -- F1",
        )
    )

    # A mean of 1.5 on both stages takes 4.5 of three actions in a row.
    assert_parts(found, {"schedule": [1 / 3, 1 / 3], "variation": [1 / 4 - 1 / 3] * 2})


def test_an_action_that_waits_half_its_time_makes_all_wait() -> None:
    found = audit(
        *drawn(
            "F0 .. F1 _",
            "_  _  F0 F1",
        )
    )

    assert_parts(found, {"schedule": [1 / 3, 1 / 3], "lock": [1 / 2 - 1 / 3] * 2})
    assert [row.within for row in found.rows] == pytest.approx([1 / 4, 0])


def test_waiting_within_an_action_that_makes_nobody_later_is_not_the_locks() -> None:
    found = audit(
        *drawn(
            "F0 -- F1 -- _  _",
            "_  _  F0 .. F1 --",
        )
    )

    # Without it, the worker would be idle as long, until F1 arrives.
    assert [row.lock for row in found.rows] == [0, 0]
    assert [row.idle for row in found.rows] == pytest.approx([2 / 6, 3 / 6])
    assert [row.within for row in found.rows] == pytest.approx([0, 1 / 6])


def test_waiting_for_a_core_is_told_from_waiting_for_the_lock() -> None:
    timeline, computing = drawn("F0 -- .. ..")

    found = audit(timeline, computing, {Action(Kind.FORWARD, 0, 0): 1.0})

    assert_parts(found, {"queue": [1 / 3], "lock": [1 / 2 - 1 / 3]})
    assert [row.within for row in found.rows] == [1 / 2]


def test_halves_count_by_their_length_and_the_loss_between_does_not() -> None:
    found = audit(
        *drawn(
            "F0 _  | _  _  _  _  _  B0 -- --",
            "_  F0 | _  _  B0 -- -- _  _  _",
        )
    )

    assert found.seconds == 8
    assert_parts(found, {"schedule": [1 / 2, 1 / 2]})


def test_forward_alone() -> None:
    found = audit(*drawn("F0 F1 _", "_  F0 F1"))

    assert found.seconds == 3
    assert_parts(found, {"schedule": [1 / 3, 1 / 3]})


def test_idle_is_the_timelines_bubble_and_the_waiting_within_actions() -> None:
    timeline, computing = drawn(
        "F0 .. F1 -- _  _  _  |  _  _  _  B1 B0",
        "_  _  F0 _  _  F1 .. |  B1 _  B0 _  _",
    )

    found = audit(timeline, computing)

    assert found.all.idle - found.all.within == pytest.approx(timeline.bubble)
    assert sum(getattr(found.all, part) for part in PARTS) == pytest.approx(found.all.idle)


def test_typical_leaves_the_longest_and_the_shortest_out() -> None:
    runs = [audit(*drawn("F0 " + "_ " * pause + "F1")) for pause in (0, 2, 4, 96)]

    found = typical(runs)

    assert found.seconds == 5
    assert found.rows[0].transfers == pytest.approx((2 / 4 + 4 / 6) / 2)


class Sleep(nn.Module):
    """Takes a while and computes nothing."""

    SECONDS = 0.05

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.SECONDS)
        return 2 * x


def test_an_action_that_sleeps_is_idle() -> None:
    model = GPipe(nn.Sequential(Sleep(), nn.Identity()), [1, 1], devices=["cpu"] * 2)
    try:
        with thread_clocks():
            model(torch.ones(1, 1))
        assert model.timeline is not None
        found = bubble_audit.of_threads(model.timeline)
    finally:
        model.close()

    # At least, for whatever else the thread waited.
    assert found.rows[0].within * found.seconds > 0.99 * Sleep.SECONDS
    assert found.rows[0].lock > 0
    assert sum(getattr(found.all, part) for part in PARTS) == pytest.approx(found.all.idle)


def test_small_run_prints_every_case(capsys: pytest.CaptureFixture[str]) -> None:
    small = "--rounds 1 --blocks 4 --width 64 --time 4 --rows 4 --chunks 2"
    before = torch.get_num_threads()

    bubble_audit.main(small.split())

    assert torch.get_num_threads() == before
    report = capsys.readouterr().out
    for case in ("2 equal, always", "1 : 3, never", "4 tiny, never", "the same, 1 thread"):
        assert case in report


def test_cases_of_a_gpu() -> None:
    given = options("bubble_audit", "", rounds=1, argv=[], gpu_width=64, time=1, rows=4, chunks=2)

    for case in bubble_audit.on_gpu(given, device="cpu"):
        found, _ = bubble_audit.run(case, rounds=1)

        assert len(found.rows) == len(case.devices)
        assert sum(getattr(found.all, part) for part in PARTS) == pytest.approx(found.all.idle)
