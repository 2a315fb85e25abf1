"""What a forward may change, kept so that the forward can be run again as if for the first time.

See Note [Drawing from a private stream] for why that may be needed. What is kept are buffers, which
layers update as they run, and inputs, which they may edit in place. With gradients on, inputs need
no copy here: stages guard theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from lightning_gpipe.core.data import FlatTree
from lightning_gpipe.core.faithful.buffers import Buffers


class Snapshot:
    """The buffers of some stages and the inputs of all, as they are now.

    Args:
        buffers: The buffers of each stage.
        inputs: The micro-batches.
        guarded: Whether the stages keep the inputs from being edited.
    """

    def __init__(
        self, buffers: Iterable[Buffers], inputs: Sequence[FlatTree], *, guarded: bool
    ) -> None:
        self._buffers = list(buffers)
        self._inputs = inputs if guarded else [_copy(flat) for flat in inputs]

    def restore(self) -> Sequence[FlatTree]:
        """Put the buffers back, and return the inputs."""
        for each in self._buffers:
            each.restore()
        return self._inputs


def _copy(flat: FlatTree) -> FlatTree:
    return FlatTree([x.clone() if isinstance(x, Tensor) else x for x in flat.leaves], flat.spec)
