"""A record of the inputs and the state that a stage's layers edit in forward.

To copy every input and every buffer before each run would double their memory. So the first run
copies all and records which of them the layers edit, and later runs copy only those. This is
recorded by call signature: the training flags, and the structure of the inputs.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor

from lightning_gpipe.core.data import equal
from lightning_gpipe.core.layout import Slot

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")

TrainingFlags = bytes  # of each module, in order, 1 or 0: they are compared and hashed at once

_CAPACITY = 64


def record(records: dict[Key, Value], key: Key, value: Value) -> None:
    """Record a value for a call signature, and forget the one recorded least recently."""
    # Not an OrderedDict, which hashes its keys to list its values.
    records.pop(key, None)
    records[key] = value
    if len(records) > _CAPACITY:
        del records[next(iter(records))]


@dataclass(slots=True, eq=False)
class Behavior:
    """The behavior of a stage's layers for one call signature; None: not known before a run."""

    # For each set of guarded input leaves, the indices of those that are edited.
    edited_inputs: dict[tuple[int, ...], set[int]] = field(default_factory=dict)
    edited_buffers: set[Slot] | None = None
    edited_parameters: frozenset[Slot] | None = None  # frozen ones
    changed_attributes: frozenset[Slot] | None = None  # Python attributes, by their contents
    captures: bool = False  # uses tensors with a gradient from outside, or from an earlier run
    searches: int = 0  # how many runs were searched for such tensors
    searching: bool = True  # whether the next one is


class Behaviors:
    """The behavior of one stage's layers, for the call signatures that were used last."""

    def __init__(self) -> None:
        self._recorded: dict[Hashable, Behavior] = {}
        self._latest: tuple[TrainingFlags, Hashable, Behavior] | None = None

    @property
    def edited_parameters(self) -> set[Slot]:
        """The slots of the frozen parameters that the layers edit for any call signature."""
        return set().union(*[b.edited_parameters or () for b in self._recorded.values()])

    @property
    def all(self) -> Behavior:
        """All edits of state for any call signature, as one behavior."""
        union, recorded = Behavior(), self._recorded.values()
        union.edited_buffers = set().union(*[b.edited_buffers or () for b in recorded])
        union.edited_parameters = frozenset(self.edited_parameters)
        union.changed_attributes = frozenset().union(
            *[b.changed_attributes or () for b in recorded]
        )
        return union

    def of(self, flags: TrainingFlags, structure: Hashable) -> Behavior:
        """Return the behavior for these training flags and this structure of inputs."""
        latest = self._latest  # to hash a structure takes longer than to see that it is the same
        if latest is not None and latest[0] == flags and latest[1] == structure:
            return latest[2]
        signature = flags, structure
        behavior = self._recorded.get(signature) or Behavior()
        record(self._recorded, signature, behavior)
        self._latest = flags, structure, behavior
        return behavior

    def __reduce__(self) -> tuple[type[Behaviors], tuple[()]]:
        return Behaviors, ()  # a copy records it anew; a file must not have PyTorch's TreeSpecs


def version_of(tensor: Tensor) -> int:
    """Return the version counter, which edits increment, except those of ``tensor.data``."""
    return 0 if tensor.is_inference() else tensor._version


def same_value(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal; a NaN differs from itself."""
    same_kind = one.shape == other.shape and one.layout == other.layout
    return same_kind and (one.is_meta or equal(one, other))
