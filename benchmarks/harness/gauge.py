"""The peak GPU memory of a contestant.

Two figures: the memory of its tensors, and the memory that the caching allocator reserved for them,
which includes fragmentation and is what other processes cannot use. The published tables have the
second.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch


class Peak(NamedTuple):
    """The most bytes at a time, summed over the devices; NaN where nobody counts them."""

    allocated: float = math.nan
    reserved: float = math.nan


class Gauge:
    """What is taken beyond that which was there when the gauge was made.

    Args:
        devices: Those that are counted, each once; a CPU does not count.
    """

    def __init__(self, devices: Iterable[str | torch.device]) -> None:
        found = dict.fromkeys(map(torch.device, devices))
        self._gpus = [device for device in found if device.type == "cuda"]
        self._settle()
        self._before = self._now(torch.cuda.memory_allocated, torch.cuda.memory_reserved)

    def synchronize(self) -> None:
        """Wait until the devices are idle."""
        for gpu in self._gpus:
            torch.cuda.synchronize(gpu)

    def peak(self, work: Callable[[], object]) -> Peak:
        """The peak while ``work`` runs; what others left in the cache does not count."""
        if not self._gpus:
            work()
            return Peak()
        self._settle()
        for gpu in self._gpus:
            torch.cuda.reset_peak_memory_stats(gpu)
        work()
        self.synchronize()
        peak = self._now(torch.cuda.max_memory_allocated, torch.cuda.max_memory_reserved)
        return Peak(
            peak.allocated - self._before.allocated,
            peak.reserved - self._before.reserved,
        )

    def _now(
        self,
        allocated: Callable[[torch.device], int],
        reserved: Callable[[torch.device], int],
    ) -> Peak:
        return Peak(sum(map(allocated, self._gpus)), sum(map(reserved, self._gpus)))

    def _settle(self) -> None:
        """Let go of what nobody uses."""
        gc.collect()
        if self._gpus:
            self.synchronize()
            torch.cuda.empty_cache()
