"""The benchmark runs, small; what it measures is not for a test to judge."""

from functools import partial

import pytest

from benchmarks import largest, memory
from benchmarks.harness.allocations import Counting, peak_bytes

SMALL = "--channels 2 --narrow 2 --batch-size 2 --chunks 2 --large-batch 2 --large-side 64"


def test_small_run_prints_every_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memory, "BLOCKS", 1)
    monkeypatch.setattr(memory, "BALANCE", [10, 20, 20, 15])
    monkeypatch.setattr(largest, "PLAIN", (1, 8))
    monkeypatch.setattr(largest, "LARGER", (1, 10))
    monkeypatch.setattr(largest, "WIDTHS", range(2, 12, 4))
    monkeypatch.setattr(memory, "agree_in_double", lambda task, chunks: None)

    memory.main(SMALL.split())

    report = capsys.readouterr().out
    for row in ("torchgpipe, always", "ours, one device, never", "ours, 4 threads, except_last"):
        assert row in report
    assert "U-Net (1, 10), ours, counted" in report
    assert "U-Net (1, 10), ours, 1F1B, nothing recomputed, counted" in report
    assert "counting finds" in report


@pytest.mark.parametrize(
    "wrap",
    [
        largest.alone,
        partial(largest.in_stages, balance=None, chunks=2),
        partial(largest.by_micro_batch, chunks=2),
    ],
    ids=["alone", "in stages", "by micro-batch"],
)
def test_counted_on_fake_tensors_is_counted_on_real_ones(
    monkeypatch: pytest.MonkeyPatch, wrap: largest.Wrap
) -> None:
    """Measured says more: convolutions take scratch memory by instruction set and threads."""
    monkeypatch.setattr(memory, "BLOCKS", 1)
    task = memory.small_task(8, 2, 64)
    run = wrap(task.module, "cpu")
    there = [*task.module.parameters(), task.x, task.target]

    def step() -> None:
        run(task.x, task.target)

    measured = peak_bytes(step, clear=task.module.zero_grad) + sum(each.nbytes for each in there)
    task.module.zero_grad()
    with Counting(there) as counting:
        step()

    assert largest.need_counted(1, 8, 2, 64, wrap) == counting.peak
    assert counting.peak <= measured


def test_widest_needs_no_more_than_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(largest, "LARGER", (1, 4))
    monkeypatch.setattr(largest, "WIDTHS", (4, 6, 8))
    one_stage = partial(largest.in_stages, balance=None, chunks=2)
    needs = {c: largest.need_counted(1, c, 2, 64, one_stage) for c in largest.WIDTHS}

    assert largest.widest_within(needs[6], 2, 64) == 6
    assert largest.widest_within(needs[8] - 1, 2, 64) == 6
    assert largest.widest_within(needs[4] - 1, 2, 64) is None


def test_contestants_agree() -> None:
    pytest.importorskip("torchgpipe")
    memory.agree_in_double(memory.small_task(2, 2, 64), 2)
