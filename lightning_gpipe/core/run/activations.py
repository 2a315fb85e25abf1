"""The activations of a micro-batch that a stage keeps until its backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from lightning_gpipe.core.data import FlatTree
from lightning_gpipe.core.faithful import ModuleState
from lightning_gpipe.core.run.backward.roots import Root


class Activations(NamedTuple):
    """The inputs of a micro-batch, and its graph or the state to recompute it from."""

    inputs: FlatTree  # the leaves of its graph
    roots: list[Root | None] | None  # of its graph; None if the graph was dropped
    saved: ModuleState | None = None  # the layers before forward, to recompute it
    versions: Sequence[int] = ()  # of the inputs, if it will be recomputed
    sizes: tuple[int, ...] = ()  # the output leaves on each way, if there are several
    former: Sequence[Any] = ()  # if it was recomputed, the inputs of its first forward


def versions_in(inputs: FlatTree) -> list[int]:
    """Return the version counters of the tensors among the leaves; inference tensors have none."""
    versions = []
    for leaf in inputs.leaves:  # no comprehension, which is one more call for each micro-batch
        if isinstance(leaf, Tensor) and not leaf.is_inference():
            versions.append(leaf._version)
    return versions
