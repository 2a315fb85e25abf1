"""Measures calls, by seconds or floating-point operations, and the bus between host and device."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache, partial
from typing import Literal, TypeVar

import torch
from torch.utils.flop_counter import FlopCounterMode

T = TypeVar("T")

_COPIES = 4  # to measure a bus, of which the fastest counts


class Meter:
    """Measures calls: their seconds or, on the meta device, their floating-point operations.

    ``exact``: a call costs the same every time, also if its activations are dropped.
    """

    def __init__(self, device: torch.device) -> None:
        self.exact = device.type == "meta"
        self.unit: Literal["s", "FLOP"] = "FLOP" if self.exact else "s"
        self._device = device
        if device.type == "cuda":
            self._begin_backward()

    def __call__(self, call: Callable[[], T]) -> tuple[T, float]:
        if self.exact:
            with FlopCounterMode(display=False) as counter:
                result = call()
            return result, float(counter.get_total_flops())
        self._wait()
        start = time.perf_counter()
        result = call()
        self._wait()
        return result, time.perf_counter() - start

    def _begin_backward(self) -> None:
        """Run a kernel on autograd's thread for the GPU: cuBLAS warns there if it is the first."""
        with torch.enable_grad():
            torch.ones((), device=self._device, requires_grad=True).exp().backward()

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


@cache
def host_speed(device: torch.device, size: int) -> float:
    """Return the bytes per second of a copy of ``size`` bytes from pinned memory to a GPU."""
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    there, meter = torch.empty_like(host, device=device), Meter(device)
    copy = partial(there.copy_, host, non_blocking=True)
    return size / min(meter(copy)[1] for _ in range(_COPIES))
