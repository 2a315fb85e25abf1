"""The benchmark runs, small; what it measures is not for a test to judge."""

from functools import partial

import pytest

from benchmarks import memory
from benchmarks.harness.allocations import Counting, peak_bytes

SMALL = "--channels 2 --narrow 2 --batch-size 2 --chunks 2 --large-batch 2 --large-side 64"


def test_small_run_prints_every_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memory, "BLOCKS", 1)
    monkeypatch.setattr(memory, "BALANCE", [10, 20, 20, 15])
    monkeypatch.setattr(memory, "PLAIN", (1, 8))
    monkeypatch.setattr(memory, "LARGER", (1, 10))
    monkeypatch.setattr(memory, "WIDTHS", range(2, 12, 4))
    monkeypatch.setattr(memory, "agree_in_double", lambda task, chunks: None)

    memory.main(SMALL.split())

    report = capsys.readouterr().out
    for row in ("torchgpipe, always", "ours, one device, never", "ours, 4 threads, except_last"):
        assert row in report
    assert "U-Net (1, 10), ours" in report
    assert "counting finds" in report


@pytest.mark.parametrize("pipelined", [False, True])
def test_counted_on_fake_tensors_is_counted_on_real_ones(
    monkeypatch: pytest.MonkeyPatch, pipelined: bool
) -> None:
    """Measured says more: convolutions take scratch memory by instruction set and threads."""
    wrap = partial(memory.in_stages, balance=None, chunks=2) if pipelined else memory.alone
    monkeypatch.setattr(memory, "BLOCKS", 1)
    task = memory.small_task(8, 2, 64)
    model = wrap(task.module, "cpu")
    there = [*task.module.parameters(), task.x, task.target]

    def step() -> None:
        task.loss(model(task.x), task.target).backward()

    measured = peak_bytes(step, clear=task.module.zero_grad) + sum(each.nbytes for each in there)
    task.module.zero_grad()
    with Counting(there) as counting:
        step()

    assert memory.need_counted(1, 8, 2, 64, wrap) == counting.peak
    assert counting.peak <= measured


def test_widest_needs_no_more_than_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "LARGER", (1, 4))
    monkeypatch.setattr(memory, "WIDTHS", (4, 6, 8))
    one_stage = partial(memory.in_stages, balance=None, chunks=2)
    needs = {c: memory.need_counted(1, c, 2, 64, one_stage) for c in memory.WIDTHS}

    assert memory.widest_within(needs[6], 2, 64) == 6
    assert memory.widest_within(needs[8] - 1, 2, 64) == 6
    assert memory.widest_within(needs[4] - 1, 2, 64) is None


def test_contestants_agree() -> None:
    pytest.importorskip("torchgpipe")
    memory.agree_in_double(memory.small_task(2, 2, 64), 2)
