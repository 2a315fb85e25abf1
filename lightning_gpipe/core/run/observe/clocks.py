"""Clocks of actions, on the host or on a CUDA stream.

On CPU an action is over when its Python call returns. On CUDA that call only queues kernels, so the
worker records an event before and after. Events become times only on request: nothing waits for the
device during a step.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

Timestamp = float | torch.cuda.Event
Reading = Callable[[Timestamp], float]


class Clock(ABC):
    """Takes timestamps, and converts them to seconds later.

    Attributes:
        device: The device; all its clocks are read together.
    """

    device: torch.device

    @abstractmethod
    def now(self) -> Timestamp:
        """Return the present timestamp."""

    @abstractmethod
    def reading(self) -> Reading:
        """Return a function from timestamps of the device to seconds of ``time.perf_counter``."""


class HostClock(Clock):
    """The host's time."""

    device = torch.device("cpu")
    now = staticmethod(time.perf_counter)  # called four times for each micro-batch and stage

    def reading(self) -> Reading:
        return _as_it_is


class CudaClock(Clock):
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
        last = self.now()
        last.synchronize()
        host = time.perf_counter()

        def seconds(timestamp: Timestamp) -> float:
            assert not isinstance(timestamp, float), "a timestamp of a CUDA device is an event"
            timestamp.synchronize()  # another stream of the device may not have reached it yet
            return host - 1e-3 * timestamp.elapsed_time(last)

        return seconds


def clock_of(stream: torch.cuda.Stream | None) -> Clock:
    """The clock of a worker that computes on ``stream``, or on the host."""
    return HostClock() if stream is None else CudaClock(stream)


def _as_it_is(timestamp: Timestamp) -> float:
    assert isinstance(timestamp, float), "a timestamp of the host is in seconds"
    return timestamp
