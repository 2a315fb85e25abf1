"""Notices layers that talk to each other past the pipeline.

In a plain nn.Sequential a layer may write into a dict that a later layer reads, or set an attribute
on the tensor that it returns. In a pipeline stages run at the same time, each on another
micro-batch, and tensors that travel are new objects. So what one stage finds may be another
micro-batch's, or nothing. Objects that modules of several stages hold are compared before and after
the first mini-batches, and the attributes of tensors that leave a stage are looked at in its first
runs.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from lightning_gpipe.core.data import MARKS
from lightning_gpipe.core.faithful import Contents
from lightning_gpipe.core.plan import CONTAINERS, Partition, held_in, is_own, within
from lightning_gpipe.core.run.stage import Stage

_OF_PYTORCH = "_dynamo_"  # what it sets on tensors, such as on the offsets of jagged ones
_MINIBATCHES = 2  # the second, because a layer may make something in the first


class _Shared(NamedTuple):
    """An object that modules of several stages hold, before a mini-batch."""

    kind: str
    names: list[str]
    contents: Contents


class SideChannels:
    """Compares what modules of several stages hold, in the first mini-batches.

    Args:
        partitions: What each stage runs; those of other processes have copies of what is shared.
    """

    def __init__(self, partitions: Sequence[Partition]) -> None:
        self._partitions = partitions
        self._count = 0

    def begin(self) -> list[_Shared]:
        """The shared objects before a mini-batch; none after the first mini-batches."""
        self._count += 1
        return _shared_by(self._partitions) if self._count <= _MINIBATCHES else []

    @staticmethod
    def end(shared: Iterable[_Shared]) -> None:
        """Warn of those that were changed in the mini-batch."""
        changed = [each for each in shared if each.contents.moved(compared=False)]
        if changed:
            found = "; ".join(
                f"a {each.kind} that is {' and '.join(each.names)}" for each in changed
            )
            warnings.warn(
                "layers of different stages must not share an object that they change in forward: "
                f"got {found}. Stages work on different micro-batches at the same time, so one "
                "finds what another micro-batch left. Return the value to the next layer, or send "
                "it by a skip connection, see lightning_gpipe.skip.",
                stacklevel=2,
            )


def warn_of_attributes(stage: Stage, leaves: Iterable[object]) -> None:
    """Warn of attributes that layers set on the tensors that leave a stage."""
    names = {
        name: None
        for leaf in leaves
        if type(leaf) in (Tensor, nn.Parameter)
        for name in vars(leaf)
        if name not in MARKS and not name.startswith(_OF_PYTORCH)
    }
    if names:
        warnings.warn(
            f"tensors that leave {stage} must not have attributes that later layers need: got "
            f"{', '.join(map(repr, names))}, which do not travel with them. Return the value next "
            "to the tensor, or send it by a skip connection, see lightning_gpipe.skip.",
            stacklevel=2,
        )


def _shared_by(partitions: Iterable[Partition]) -> list[_Shared]:
    found: dict[int, tuple[object, dict[int, str]]] = {}
    for j, partition in enumerate(partitions):
        for title, layer in zip(partition.titles, partition.layers, strict=True):
            for name, value in held_in(layer):
                for each in within(value):
                    if isinstance(each, CONTAINERS) or is_own(each):
                        names = found.setdefault(id(each), (each, {}))[1]
                        names.setdefault(j, f"{title}.{name}")
    return [
        _Shared(type(each).__name__, list(names.values()), _contents(each))
        for each, names in found.values()
        if len(names) > 1
    ]


def _contents(value: object) -> Contents:
    return Contents(vars(value) if is_own(value) else value, copied=True)
