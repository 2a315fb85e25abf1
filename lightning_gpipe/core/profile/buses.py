"""Measures the bus between the memory of the host and a device."""

from __future__ import annotations

from functools import cache, partial

import torch

from lightning_gpipe.core.profile.meters import Meter

_ROUNDS = 4  # of which the fastest counts


@cache
def host_speed(device: torch.device, size: int) -> float:
    """Return the bytes per second of a copy of so many bytes from pinned memory to a GPU."""
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    there, meter = torch.empty_like(host, device=device), Meter(device)
    copy = partial(there.copy_, host, non_blocking=True)
    return size / min(meter(copy)[1] for _ in range(_ROUNDS))
