"""The caller's CUDA streams, on which its pipeline computes in all threads.

On a worker's thread the current streams and device are the default ones, whose work would not be
ordered with that of the caller's. So those of the caller are captured at forward, and are current
wherever its layers run, in backward too: autograd runs the backward of an operator on the stream of
its forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_gpipe.core.data import record_stream
from lightning_gpipe.core.faithful.managers import NOTHING, LazyManagers, Manager


class Streams(NamedTuple):
    """The current streams and the current device of a thread."""

    streams: tuple[torch.cuda.Stream, ...] = ()  # by the index of the device; none without CUDA
    device: int = 0

    @classmethod
    def capture(cls, devices: Iterable[torch.device]) -> Streams:
        # A stage on the CPU may use a GPU too. CUDA is not initialised here if nothing needs it.
        if not (torch.cuda.is_initialized() or "cuda" in [device.type for device in devices]):
            return cls()
        count = torch.cuda.device_count()
        streams = tuple(torch.cuda.current_stream(index) for index in range(count))
        return cls(streams, torch.cuda.current_device())

    def on(self, device: torch.device) -> torch.cuda.Stream | None:
        return self.streams[device.index] if device.type == "cuda" else None

    def entered(self) -> Manager:
        return LazyManagers(self._missing) if self.streams else NOTHING

    def _missing(self) -> Iterator[Manager]:
        for stream in self.streams:
            if torch.cuda.current_stream(stream.device) != stream:
                yield torch.cuda.stream(stream)
        yield torch.cuda.device(self.device)  # a stream brings its device

    def rejoin(self) -> None:
        """Let the streams that are current on the calling thread wait for these."""
        for stream in self.streams:
            current = torch.cuda.current_stream(stream.device)
            # An older PyTorch (2.8) uses on this one what a node on the CPU returns.
            default = torch.cuda.default_stream(stream.device)
            for other in (current, default):
                if other != stream:
                    other.wait_stream(stream)

    def lend(self, tensors: Iterable[Tensor | None]) -> None:
        """Let the streams that are current on the calling thread use tensors made on these.

        Autograd does so for the results of a node that has a stream; a node on the CPU has none.
        """
        others = {}
        for stream in self.streams:
            current = torch.cuda.current_stream(stream.device)
            if current != stream:
                others[stream.device] = current
        if others:
            for tensor in tensors:
                if tensor is not None and tensor.device in others:
                    record_stream(tensor, others[tensor.device])
