"""Clocks of workers: when did an action begin and end, on the host or on a CUDA stream.

On CPU an action is over when its Python call returns. On CUDA that call only queues kernels, so the
worker queues an event before and after, and the times are read off the events when somebody asks:
nothing waits for the device during a step.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

Timestamp = float | torch.cuda.Event
Reading = Callable[[Timestamp], float]


class Clock(ABC):
    """Gives timestamps, and turns them into seconds later.

    Attributes:
        device: Whose time it is; all clocks of a device are read together.
    """

    device: torch.device

    @abstractmethod
    def now(self) -> Timestamp:
        """This moment."""

    @abstractmethod
    def reading(self) -> Reading:
        """What turns timestamps of the device into seconds of ``time.perf_counter``."""


class HostClock(Clock):
    """Time as the host sees it."""

    device = torch.device("cpu")

    def now(self) -> float:
        return time.perf_counter()

    def reading(self) -> Reading:
        return _as_it_is


class CudaClock(Clock):
    """Time as a CUDA stream sees it: a moment is when the stream gets there.

    Events tell how far apart they are, not when they were. So for a reading one more event is
    recorded, the stream is waited for, the host's clock is looked at once, and all times are
    counted back from then: with a look for each of them, actions that ran one after another would
    seem to overlap by as much as the host was late.
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
            assert not isinstance(timestamp, float), "all of a device's are events"
            timestamp.synchronize()  # one of another stream of the device may be yet to come
            return host - 1e-3 * timestamp.elapsed_time(last)

        return seconds


def clock_of(stream: torch.cuda.Stream | None) -> Clock:
    """The clock of a worker that computes on ``stream``, or on the host."""
    return HostClock() if stream is None else CudaClock(stream)


def _as_it_is(timestamp: Timestamp) -> float:
    assert isinstance(timestamp, float), "all of the host's are seconds"
    return timestamp
