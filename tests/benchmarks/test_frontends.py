"""The benchmark runs; what it measures is not for a test to judge."""

import pytest

from benchmarks import frontends


def test_small_run_prints_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    small = "--rounds 1 --stages 2 --blocks 2 --width 8 --time 4 --batch-size 4 --chunks 2"
    frontends.main(small.split())

    report = capsys.readouterr().out
    for row in (
        "nn.Sequential, hidden states",
        "nn.ModuleList, with arguments",
        "traced, with arguments, always",
        "traced, hidden states / nn.Sequential",
    ):
        assert row in report
