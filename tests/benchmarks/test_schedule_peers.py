"""The benchmark runs, small; what it measures is not for a test to judge.

Each contestant has a process of its own, which takes some seconds to start: so a few of them run.
The others are run by the tests of ``schedules`` and ``schedules_over_processes``.
"""

import pytest

from benchmarks import schedule_peers
from benchmarks.schedules import BASE, WAYS

SMALL = ["--width=64", "--time=8", "--batch-size=8", "--chunks=4", "--rounds=1", "--starts=1"]


def test_small_run_prints_every_row(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    some = [way for way in WAYS if way.name in (BASE, "1F1B")]
    monkeypatch.setattr(schedule_peers, "WAYS", some)
    monkeypatch.setattr(schedule_peers, "THEIRS", schedule_peers.THEIRS[:2])

    schedule_peers.main(SMALL)

    report = capsys.readouterr().out
    for row in (f"ours, {BASE}", "ours, 1F1B", "ScheduleGPipe", "Schedule1F1B"):
        assert row in report


def test_ours_beside_theirs_are_among_those_that_run() -> None:
    names = {way.name for way in WAYS}

    assert all(names.issuperset(each.ours) for each in schedule_peers.THEIRS)
