"""The benchmark runs; what it measures is not for a test to judge."""

import pytest

from benchmarks.overhead import main


def test_small_run_prints_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--stages=2", "--chunks=4", "--rounds=1"])

    report = capsys.readouterr().out
    for row in (
        "torchgpipe, never",
        "ours, 2 threads, always",
        "ours, one device, never",
        "ScheduleGPipe, 2 processes, 2 stages",
        "ours, 2 devices, auto / ScheduleGPipe",
        "ours, 2 threads, 1F1B",
        "ours, one device, 1F1B / fill-drain",
    ):
        assert row in report
