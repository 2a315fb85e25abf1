"""The activations of a micro-batch that a stage keeps until its backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from lightning_gpipe.core.data import FlatTree
from lightning_gpipe.core.faithful import ModuleState
from lightning_gpipe.core.run.backward.roots import Root


class Activations(NamedTuple):
    """The inputs of a micro-batch, and its graph or the state to recompute it from.

    Attributes:
        inputs: The leaves of its graph.
        roots: The roots of its graph; None if the graph was dropped.
        saved: If it will be recomputed: the state of the layers before forward.
        versions: If it will be recomputed: the version counters of the inputs.
        sizes: The number of output leaves on each way; empty if there is only one way.
        former: If it was recomputed: the inputs of its first forward, in whose graph no backward
            may run.
    """

    inputs: FlatTree
    roots: list[Root | None] | None
    saved: ModuleState | None = None
    versions: Sequence[int] = ()
    sizes: tuple[int, ...] = ()
    former: Sequence[Any] = ()


def versions_in(inputs: FlatTree) -> list[int]:
    """Return the version counters of the tensors among the leaves; inference tensors have none."""
    versions = []
    for leaf in inputs.leaves:  # no comprehension, which is one more call for each micro-batch
        if isinstance(leaf, Tensor) and not leaf.is_inference():
            versions.append(leaf._version)
    return versions
