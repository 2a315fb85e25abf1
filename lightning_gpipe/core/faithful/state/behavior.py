"""A record of the inputs and the state that a stage's layers edit in forward.

Copies of all inputs and buffers would double their memory. So only the first run of a call
signature, the training flags and the structure of the inputs, copies all; it records which of them
the layers edit, and later runs copy only those.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor

from lightning_gpipe.core.layout import Slot

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")

_CAPACITY = 64


def record(records: dict[Key, Value], key: Key, value: Value, most: int = _CAPACITY) -> None:
    """Record a value for a key, and forget the one recorded least recently if there are more."""
    # Not an OrderedDict, which hashes its keys to list its values.
    records.pop(key, None)
    records[key] = value
    if len(records) > most:
        del records[next(iter(records))]


@dataclass(slots=True, eq=False)
class Behavior:
    """The behavior of a stage's layers for one call signature; None: not known before a run."""

    # For each set of guarded input leaves, the indices of those that are edited.
    edited_inputs: dict[tuple[int, ...], set[int]] = field(default_factory=dict)
    edited_buffers: set[Slot] | None = None
    edited_parameters: frozenset[Slot] | None = None  # frozen ones
    # Whether they change the contents of Python attributes, for those that were there.
    changed_attributes: dict[Slot, bool] = field(default_factory=dict)
    captures: bool = False  # uses tensors with a gradient from outside, or from an earlier run
    searches: int = 0  # how many runs were searched for such tensors
    searching: bool = True  # whether the next one is


def version_of(tensor: Tensor) -> int:
    """Return the version counter, which edits increment, except those of ``tensor.data``."""
    return 0 if tensor.is_inference() else tensor._version
