"""What a forward may change, kept so that the forward can be run again as if for the first time.

See Note [Drawing from a private stream] for why that may be needed. What is kept are buffers, which
layers update as they run, and inputs, which they may edit in place. With gradients on, inputs need
no copy here: stages guard theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from lightning_gpipe.core.pytree import Flat


class Snapshot:
    """The buffers of ``modules`` and, with gradients off, the inputs, as they are now."""

    def __init__(self, modules: Iterable[nn.Module], inputs: Sequence[Flat]) -> None:
        self._buffers = [
            (module._buffers, name, buffer, buffer.clone())
            for module in modules
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._inputs = inputs
        if not torch.is_grad_enabled():
            self._inputs = [
                Flat([x.clone() if isinstance(x, Tensor) else x for x in flat.leaves], flat.spec)
                for flat in inputs
            ]

    @torch.no_grad()
    def restore(self) -> Sequence[Flat]:
        """Put the buffers back, and return the inputs."""
        for slots, name, buffer, value in self._buffers:
            slots[name] = buffer.copy_(value)
        return self._inputs
