"""The benchmark runs; what it measures is not for a test to judge."""

import pytest

from benchmarks.first_steps import main


def test_small_run_prints_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--blocks=2", "--width=16", "--time=4", "--batch-size=4", "--chunks=2", "--rounds=1"])

    report = capsys.readouterr().out
    for title in ("blocks", "nearly empty layers", "narrow blocks"):
        for way in ("threads", "one thread", "auto"):
            assert f"{title}, {way}" in report
