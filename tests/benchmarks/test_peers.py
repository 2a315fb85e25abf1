"""The benchmark runs; what it measures is not for a test to judge."""

import pytest

from benchmarks.harness import Times
from benchmarks.peers import fastest, main, theirs

SMALL = ["--blocks=2", "--width=64", "--time=8", "--batch-size=4", "--chunks=2", "--rounds=1"]


def test_small_run_prints_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    main(SMALL)

    report = capsys.readouterr().out
    for row in (
        "plain",
        "plain, gradients accumulated",
        "ScheduleGPipe",
        "Schedule1F1B",
        "ours, never",
        "torchgpipe, always, 2 threads",
        "fairscale, never, 1 thread",
        "throughput ours, never / ScheduleGPipe",
    ):
        assert row in report


def test_fastest_is_by_median() -> None:
    one, two = theirs("torchgpipe", "always", 1), theirs("torchgpipe", "always", 2)
    times = {one: Times((1.0, 5.0, 6.0)), two: Times((3.0, 4.0, 9.0))}

    assert fastest(times, [one, two]) == "torchgpipe, always, 2 threads"
