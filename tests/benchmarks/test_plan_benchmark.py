"""The benchmark runs; what it measures is not for a test to judge."""

import pytest
import torch

from benchmarks import plan


def test_small_run_prints_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    try:
        plan.main(["--models", "tiny", "--rounds", "1"])
    finally:
        torch.set_num_threads(threads)

    report = capsys.readouterr().out
    for row in (
        "tiny, chunks=2, never: time",
        "tiny, chunks=4, always: time",
        "tiny, chunks=1, always: bytes kept",
        "tiny, chunks=4, split_backward=True: time",
        "tiny, chunks=4, schedule='1f1b': bytes kept",
        "tiny, chunks=4, schedule='zero_bubble': time",
        "tiny, chunks=4, interleaved: time",
    ):
        assert row in report
