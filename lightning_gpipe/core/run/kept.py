"""What a stage keeps of a micro-batch until its backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from lightning_gpipe.core.data import FlatTree
from lightning_gpipe.core.faithful import Saved
from lightning_gpipe.core.run.roots import Root


class Kept(NamedTuple):
    """Its inputs, and where its backward starts or what its recomputation needs.

    Attributes:
        inputs: The leaves of its graph.
        roots: Where backward of the outputs starts; None if the graph was dropped.
        saved: If it will be recomputed: the state of the layers from before.
        versions: The version counters of the inputs, likewise.
        terms: The number of the leaves of its loss terms, likewise.
        sizes: The number of the leaves of each way on which it leaves; only if there are several.
        former: If it was recomputed: the inputs of its first forward, in whose graph nothing may
            run backward.
    """

    inputs: FlatTree
    roots: list[Root | None] | None
    saved: Saved | None = None
    versions: Sequence[int] = ()
    terms: int = 0
    sizes: tuple[int, ...] = ()
    former: Sequence[Any] = ()

    @classmethod
    def dropped(cls, inputs: FlatTree, saved: Saved | None, terms: int) -> Kept:
        """What is kept of a micro-batch that will be recomputed."""
        return cls(inputs, None, saved, _versions(inputs), terms)

    @property
    def edited(self) -> bool:
        """Whether an input was edited since forward, although it will be needed again."""
        return self.roots is None and _versions(self.inputs) != self.versions


def _versions(inputs: FlatTree) -> list[int]:
    """The version counters of the tensors among the leaves; inference tensors have none."""
    versions = []
    for leaf in inputs.leaves:
        if isinstance(leaf, Tensor) and not leaf.is_inference():
            versions.append(leaf._version)
    return versions
