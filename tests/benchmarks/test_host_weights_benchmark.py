"""The prediction of ``benchmarks.host_weights`` falls with the number of micro-batches."""

from __future__ import annotations

from benchmarks.host_weights import DEVICES, share, waiting


def test_shares_fall_with_micro_batches() -> None:
    for device in DEVICES.values():
        shares = [waiting(device, 7, 1, m, 2048) for m in (1, 4, 16)]
        assert sorted(shares, reverse=True) == shares
        assert 0 <= shares[-1] < 0.01


def test_share_of_weights_that_come_at_once() -> None:
    assert share(1e-3, 0.0, stages=8, gpus=1, m=4) == 0
