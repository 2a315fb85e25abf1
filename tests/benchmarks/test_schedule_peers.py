"""The benchmark runs, small; what it measures is not for a test to judge."""

import pytest

from benchmarks.schedule_peers import THEIRS, main
from benchmarks.schedules import WAYS

SMALL = ["--width=64", "--time=8", "--batch-size=8", "--chunks=4", "--rounds=1", "--starts=1"]


def test_small_run_prints_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    main(SMALL)

    report = capsys.readouterr().out
    for way in WAYS:
        assert f"ours, {way.name}" in report
    for each in THEIRS:
        assert each.name in report
