"""The benchmark runs, small; what it measures is not for a test to judge."""

import pytest

from benchmarks import split_backward


def test_small_run_prints_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    split_backward.main(["--rounds", "1", "--size", "16"])

    report = capsys.readouterr().out
    for name, _, _ in split_backward.layers(16):
        assert name in report
