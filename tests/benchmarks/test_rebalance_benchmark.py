"""The benchmark runs; what it measures is not for a test to judge."""

import pytest

from benchmarks import rebalance


def test_small_run_prints_every_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rebalance, "FORWARD", 1e-4)
    monkeypatch.setattr(rebalance, "BACKWARD", 1e-4)

    rebalance.main(["--epochs", "3", "--steps", "2"])

    report = capsys.readouterr().out
    for row in (
        "throughput, after the move / before",
        "throughput, after the move / without Rebalance",
        '"claim": "tensors of 16 that differ at the end",\n      "found": 0,',
    ):
        assert row in report
