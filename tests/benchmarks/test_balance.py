"""The benchmark runs; what it measures is not for a test to judge."""

import pytest
import torch

from benchmarks import balance
from benchmarks.models import llama
from lightning_gpipe import GPipe


@pytest.mark.parametrize("clock", ["wall", "computed"])
def test_small_run_prints_every_row(clock: str, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    try:
        balance.main(f"--models tiny --rounds 1 --clock {clock}".split())
    finally:
        torch.set_num_threads(threads)

    report = capsys.readouterr().out
    for row in (
        "tiny: slowest stage by time / best",
        "tiny: stage 1, measured layers / timeline",
    ):
        assert row in report


def test_llama_runs_the_same_as_a_pipeline() -> None:
    torch.manual_seed(0)
    model, tokens = llama(3, 16, 2, tokens=7).double(), torch.randint(7, (4, 5))
    expected = model(tokens)

    piped = GPipe(model, [1, 2], module="layers", devices=["cpu"] * 2, chunks=2)

    torch.testing.assert_close(piped(tokens), expected)
    piped.close()
