"""Buffers that layers change as they run, kept as a forward found them.

The power iteration of a spectral norm, a moving average, a counter: a layer that moves such a state
on with every forward computes something else when it is run again. A recomputation must find the
buffers as the first forward did, and must not move them on a second time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

Place = tuple[dict[str, Tensor | None], str]


class _Saved(NamedTuple):
    slots: dict[str, Tensor | None]
    name: str
    buffer: Tensor
    value: Tensor


class Buffers:
    """The values that the buffers in some places have now."""

    def __init__(self, places: Iterable[Place]) -> None:
        self._saved = [
            _Saved(slots, name, buffer, buffer.clone())
            for slots, name in places
            if (buffer := slots.get(name)) is not None
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Give the buffers these values back."""
        for slots, name, buffer, value in self._saved:
            slots[name] = buffer.copy_(value)

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Put these values in the buffers' places for a ``with`` block, which may change them.

        The buffers themselves are not written to: a graph may have saved them.
        """
        found = [slots.get(name) for slots, name, _, _ in self._saved]
        for slots, name, _, value in self._saved:
            slots[name] = value
        try:
            yield
        finally:
            for (slots, name, _, _), buffer in zip(self._saved, found, strict=True):
                slots[name] = buffer


class StageBuffers:
    """The buffers of one stage's modules, and which of them its layers change."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        places = [(module, name) for module in modules for name in module._buffers]
        self._places: list[Place] = [(module._buffers, name) for module, name in places]
        # PyTorch does not count the updates of running statistics as edits.
        self._uncounted = {
            k for k, (module, _) in enumerate(places) if isinstance(module, _NormBase)
        }
        self._changing: set[int] | None = None  # None until the stage has run once

    def all(self) -> Buffers:
        """The values of all buffers."""
        return Buffers(self._places)

    def changing(self) -> Buffers:
        """The values of those that the layers change; before the first run that may be any."""
        if self._changing is None:
            return self.all()
        return Buffers(self._places[k] for k in sorted(self._changing | self._uncounted))

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Find out which buffers a ``with`` block changes."""
        before = self._states()
        yield
        changed = {k for k, state in enumerate(self._states()) if state != before[k]}
        self._changing = changed | (self._changing or set())

    def _states(self) -> list[tuple[int, int]]:
        buffers = (slots.get(name) for slots, name in self._places)
        return [(id(b), 0 if b is None or b.is_inference() else b._version) for b in buffers]
