"""The CUDA streams of the caller, on which its pipeline computes on whichever thread it runs.

PyTorch has a current stream of each device, and a current device, for each thread. A layer uses
them without a word: those of its stage's device for all that it computes, and those of another
device if it sends a tensor there. On a worker's thread they are the default ones. If the caller had
others, their work would not be ordered with that of the layers, and they would read each other's
tensors before these are written, which is seen once in a thousand runs.

So the caller's streams, of all devices, are captured at forward, and current wherever its layers
run, in backward too: the engine runs the backward of an operator on the stream of its forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_gpipe.core.data import record_stream
from lightning_gpipe.core.faithful.managers import NOTHING, Lazily, Manager


class Streams(NamedTuple):
    """What is current on a thread that uses CUDA.

    Attributes:
        streams: The stream of each device, by its index; none where CUDA is not in use.
        device: The index of the device.
    """

    streams: tuple[torch.cuda.Stream, ...] = ()
    device: int = 0

    @classmethod
    def capture(cls, devices: Iterable[torch.device]) -> Streams:
        """What is current on the calling thread, which runs a pipeline on ``devices``."""
        # A stage on the CPU may use a GPU too. Where nothing has, nothing is initialised here.
        if not (torch.cuda.is_initialized() or "cuda" in [each.type for each in devices]):
            return cls()
        count = torch.cuda.device_count()
        streams = tuple(torch.cuda.current_stream(index) for index in range(count))
        return cls(streams, torch.cuda.current_device())

    def on(self, device: torch.device) -> torch.cuda.Stream | None:
        """The stream of a device; None for the CPU."""
        return self.streams[device.index] if device.type == "cuda" else None

    def entered(self) -> Manager:
        """Make these current on the calling thread for the duration of a ``with`` block."""
        return Lazily(self._missing) if self.streams else NOTHING

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

        Autograd's engine does it for those that a node with a stream returns; one on the CPU has
        none.
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
