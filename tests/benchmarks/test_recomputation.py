"""The benchmark runs, small; what it measures is not for a test to judge."""

import pytest

from benchmarks import recomputation


def test_small_run_prints_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    small = "--rounds 1 --stages 2 --blocks 2 --width 8 --time 4 --batch-size 4 --chunks 2"
    recomputation.main(small.split())

    report = capsys.readouterr().out
    for row in ("torch.utils.checkpoint", "ours, always", "gradient accumulation", "ours, never"):
        assert row in report
