"""The most memory that a device has had in use."""

from __future__ import annotations

import sys

import torch


def peak_memory(device: torch.device) -> float | None:
    """The bytes, since the process began; of the CPU those of the process, None if unknown."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    try:
        import resource
    except ImportError:  # Windows has none
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak if sys.platform == "darwin" else 1024 * peak)  # bytes there, KiB elsewhere
