"""The benchmark runs; what it measures is not for a test to judge."""

import sys

import pytest
import torch

from benchmarks import cpu_pipeline


def test_small_run_prints_every_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = "--blocks 2 --width 64 --time 8 --batch-size 4 --chunks 2 --repetitions 1"
    monkeypatch.setattr(sys, "argv", ["cpu_pipeline.py", *small.split()])
    before = torch.get_num_threads()

    cpu_pipeline.main()
    torch.set_num_threads(before)

    report = capsys.readouterr().out
    for row in ("plain, one thread", "two halves at once x (m + 1) / m", "pipeline, never"):
        assert row in report
