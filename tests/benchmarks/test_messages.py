"""The benchmark runs; what it measures is not for a test to judge."""

import pytest

from benchmarks.messages import main


def test_small_run_prints_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--chunks=2", "--rounds=1", "--mib=1"])

    report = capsys.readouterr().out
    for row in ("threads", "processes", "ScheduleGPipe", "output of 1 MiB", "batch of 1 MiB"):
        assert row in report
