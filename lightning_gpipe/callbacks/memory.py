"""The peak memory of a device."""

from __future__ import annotations

import sys

import torch


def peak_memory(device: torch.device) -> float | None:
    """Return the peak in bytes since the process began; None if unknown.

    For the CPU it is the peak of the process.
    """
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    try:
        import resource
    except ImportError:  # on Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak if sys.platform == "darwin" else 1024 * peak)  # bytes there, KiB elsewhere
