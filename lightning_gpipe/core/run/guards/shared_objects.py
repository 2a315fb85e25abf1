"""Side channels between layers, which talk to each other past the pipeline.

In a plain nn.Sequential a layer may write into a dict that a later layer reads, or set an attribute
on the tensor that it returns. Stages run at the same time, each on another micro-batch, and tensors
that travel are new objects: a stage would read another micro-batch's value, or none. So the first
mini-batches are checked for edits of objects that several stages hold, of the caller's tensors, and
for attributes of tensors.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

from torch import Tensor, nn

from lightning_gpipe.core.data import MARKS
from lightning_gpipe.core.faithful import Contents
from lightning_gpipe.core.layout import CONTAINERS, Partition, attributes_in, is_user_object, within
from lightning_gpipe.core.run.stage import Stage

T = TypeVar("T")

_OF_PYTORCH = "_dynamo_"  # attributes that it sets, such as on the offsets of jagged tensors
_MINIBATCHES = 2  # the second, because a layer may make something in the first


class _Shared(NamedTuple):
    """An object that modules of several stages hold, before a mini-batch."""

    kind: str
    names: list[str]
    contents: Contents


class SideChannels:
    """Compares objects that modules of several stages hold, in the first mini-batches."""

    def __init__(self, partitions: Sequence[Partition]) -> None:
        self._partitions = partitions
        self._count = 0

    def watch(self, run: Callable[[], T]) -> T:
        """Run a mini-batch, and warn of shared objects that it changed if it is a first one."""
        self._count += 1
        shared = _shared_by(self._partitions) if self._count <= _MINIBATCHES else []
        try:
            return run()
        finally:  # a shared object may be why it fails
            _warn_of_changed(shared)


def _warn_of_changed(shared: Iterable[_Shared]) -> None:
    changed = [each for each in shared if each.contents.moved(compared=False)]
    if changed:
        objects = "; ".join(f"a {each.kind} that is {' and '.join(each.names)}" for each in changed)
        warnings.warn(
            "layers of different stages must not share an object that they change in forward: got "
            f"{objects}. Stages work on different micro-batches at the same time, so one finds "
            "what another micro-batch left. Return the value to the next layer, or send it by a "
            "skip connection, see lightning_gpipe.skip.",
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


def warn_of_edited_inputs(editors: Iterable[str]) -> None:
    """Warn of layers, by their titles, that edit the tensors that a pipeline is called with."""
    warnings.warn(
        "the input of a pipeline that its first layers edit in place must not be used again, as in "
        f"layers(h) + h: got an edit by {', '.join(dict.fromkeys(editors))}. They edit a copy, so "
        "what uses the tensor after the call finds it as it was, where the plain module has edited "
        "it. Write the out-of-place form, such as nn.ReLU(inplace=False).",
        stacklevel=2,
    )


def _shared_by(partitions: Iterable[Partition]) -> list[_Shared]:
    names_of: dict[int, tuple[object, dict[int, str]]] = {}
    for j, partition in enumerate(partitions):
        for title, layer in partition.titled_layers:
            for name, value in attributes_in(layer):
                for item in within(value):
                    if isinstance(item, CONTAINERS) or is_user_object(item):
                        names = names_of.setdefault(id(item), (item, {}))[1]
                        names.setdefault(j, f"{title}.{name}")
    return [
        _Shared(
            type(item).__name__,
            list(names.values()),
            Contents(vars(item) if is_user_object(item) else item, copied=True),
        )
        for item, names in names_of.values()
        if len(names) > 1
    ]
