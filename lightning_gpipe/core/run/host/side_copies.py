"""Copies between a device and the host, on streams beside those on which stages compute.

All memory on the device is that of the stream on which a stage computes. Copies wait for it: memory
given back before is then free. The host waits for the copies at the end of a phase.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import torch

Direction = Literal["to the device", "to the host"]


class SideCopies:
    """The copies of a stage that are under way."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._under_way: list[torch.cuda.Event] = []

    def beside(self, direction: Direction) -> _Beside:
        """Run copies in a ``with`` block beside the computation; :attr:`latest` is their end."""
        return _Beside(_stream(self._device, direction), self._under_way)

    @property
    def latest(self) -> torch.cuda.Event:
        return self._under_way[-1]

    def settle(self) -> None:
        for event in self._under_way:
            event.synchronize()
        self._under_way.clear()


class _Beside:
    def __init__(self, stream: torch.cuda.Stream, under_way: list[torch.cuda.Event]) -> None:
        self._stream = stream
        self._under_way = under_way
        self._current = torch.cuda.stream(stream)

    def __enter__(self) -> torch.cuda.Stream:
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        self._current.__enter__()
        return self._stream

    def __exit__(self, *error: Any) -> None:
        self._current.__exit__(*error)
        self._under_way.append(self._stream.record_event())


@cache
def _stream(device: torch.device, direction: Direction) -> torch.cuda.Stream:
    """Return the stream of a device for copies in a direction; a bus carries both at once."""
    return torch.cuda.Stream(device)
