"""The benchmark runs, small; what it measures is not for a test to judge."""

import pytest

from benchmarks import schedules


@pytest.mark.parametrize("layers", ["sleeping", "linear"])
def test_small_run_prints_every_row(capsys: pytest.CaptureFixture[str], layers: str) -> None:
    schedules.main(["--rounds", "1", "--chunks", "4", "--milliseconds", "0.1", "--layers", layers])

    report = capsys.readouterr().out
    for way in schedules.WAYS:
        assert way.name in report
