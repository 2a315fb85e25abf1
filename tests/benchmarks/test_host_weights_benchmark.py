"""The prediction of ``benchmarks.host_weights`` falls with the number of micro-batches."""

from __future__ import annotations

from benchmarks.host_weights import DEVICES, waiting


def test_shares_fall_with_micro_batches() -> None:
    for device in DEVICES.values():
        shares = [waiting(device, 7, 1, m, 2048) for m in (1, 4, 16)]
        assert sorted(shares, reverse=True) == shares
        assert 0 <= shares[-1] < 0.01
