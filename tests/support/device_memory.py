"""The memory of devices: limits on it, and the bytes that are copied to it and from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

Limit = Callable[[int, int], None]  # of the index of a device and the bytes


@pytest.fixture
def limited() -> Iterator[Limit]:
    """Limits the bytes of a device, in a function of its index and the bytes."""
    devices: set[int] = set()

    def limit(device: int, size: int) -> None:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(size / total, device)
        devices.add(device)

    yield limit
    for device in devices:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


@pytest.fixture
def copied_bytes(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Counts the bytes that ``copy_`` has brought to devices and to the host."""
    counts = {"to the device": 0, "to the host": 0}
    copy = Tensor.copy_

    def counting(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if target.device != source.device:
            counts["to the device" if target.is_cuda else "to the host"] += source.nbytes
        return copy(target, source, non_blocking)

    monkeypatch.setattr(Tensor, "copy_", counting)
    return counts
