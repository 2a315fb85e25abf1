"""Clocks of actions, on the host or on a CUDA stream.

On CPU an action is over when its Python call returns. On CUDA that call only queues kernels, so the
worker records an event before and after. Events become times only on request: nothing waits for the
device during a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

Timestamp = float | torch.cuda.Event
Reading = Callable[[Any], float]  # from a timestamp to seconds of ``time.perf_counter``


class HostClock:
    """The host's time."""

    device = torch.device("cpu")
    now = staticmethod(time.perf_counter)  # called four times for each micro-batch and stage

    def reading(self) -> Reading:
        return lambda timestamp: timestamp  # as it is: a subclass of float may tell more


class CudaClock:
    """The time of a CUDA stream: a timestamp is an event, which the stream reaches.

    Events only tell the time between two of them. So a reading records one more event, synchronises
    with it, reads the host's clock once, and counts all times back from then. With the host's clock
    read for each event, consecutive actions would seem to overlap by the delay of the host.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.device = stream.device
        self._stream = stream

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def reading(self) -> Reading:
        """Return the conversion of the device's timestamps so far to seconds."""
        last = self.now()
        last.synchronize()
        host = time.perf_counter()

        def seconds(timestamp: torch.cuda.Event) -> float:
            timestamp.synchronize()  # another stream of the device may not have reached it yet
            return host - 1e-3 * timestamp.elapsed_time(last)

        return seconds


Clock = HostClock | CudaClock


def clock_of(stream: torch.cuda.Stream | None) -> Clock:
    """Return the clock of a worker that computes on ``stream``, or on the host."""
    return HostClock() if stream is None else CudaClock(stream)


def seconds_behind(all_of: Callable[[Any], list[Any]]) -> float:
    """Return the seconds by which the clock of this process is behind that of the first.

    ``all_of`` gathers a value of all processes. Their times of day are alike within a millisecond
    or less on the machines of a cluster.
    """
    own = time.time() - time.perf_counter()
    return float(own - all_of(own)[0])
