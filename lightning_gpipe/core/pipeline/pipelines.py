"""What runs as pipelines in one model: one module, or several over the same devices and threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.utils.hooks import RemovableHandle

from lightning_gpipe.core.pipeline.pipeline import Handles, Pipeline
from lightning_gpipe.core.pipeline.taken import Programs, Taken
from lightning_gpipe.core.pipeline.taking import laid_out
from lightning_gpipe.core.plan import Layout
from lightning_gpipe.core.run import Timeline
from lightning_gpipe.core.transport import Workers


class Pipelines:
    """A pipeline for each of what was taken of a model.

    Args:
        found: What was taken.
        layouts: The layout of each, over the same devices.
        make: Makes a pipeline of a layout; called with the threads, which all of them use.

    Attributes:
        found: As given.
    """

    def __init__(
        self,
        found: Sequence[Taken],
        layouts: Sequence[Layout],
        make: Callable[[Taken, Layout, Workers], Pipeline],
    ) -> None:
        self.found = found
        workers = Workers(*layouts)
        self._pipelines = [
            make(taken, layout, workers) for taken, layout in zip(found, layouts, strict=True)
        ]
        self._attach()

    def __getitem__(self, k: int) -> Pipeline:
        return self._pipelines[k]

    def __iter__(self) -> Iterator[Pipeline]:
        return iter(self._pipelines)

    def __len__(self) -> int:
        return len(self._pipelines)

    def set(self, name: str, value: Any) -> None:
        """Set an attribute of all of them."""
        for pipeline in self._pipelines:
            setattr(pipeline, name, value)

    def observe(self, observer: Callable[[Timeline], None]) -> RemovableHandle | Handles:
        """Call ``observer`` with the timeline of each mini-batch of any of them."""
        handles = [pipeline.engine.observe(observer) for pipeline in self._pipelines]
        return handles[0] if len(handles) == 1 else Handles(handles)

    def release(self) -> None:
        """Let the model run as without a pipeline."""
        for taken in self.found:
            taken.release()

    def close(self) -> None:
        """End the worker threads."""
        for pipeline in self._pipelines:
            pipeline.close()

    def copied(self, balances: Sequence[Sequence[int]]) -> None:
        """Make a copy of pipelines that of a copied model.

        Programs call the modules of the first model, so they are made again, and the pipelines with
        them. What is installed in a model is not copied with it.

        Args:
            balances: The number of units in each stage, of each.
        """
        if any(isinstance(taken, Programs) for taken in self.found):
            layouts = [self._layout_again(k, balance) for k, balance in enumerate(balances)]
            workers = Workers(*layouts)
            pairs = zip(self._pipelines, layouts, strict=True)
            self._pipelines = [pipeline.again(layout, workers) for pipeline, layout in pairs]
        self._attach()

    def _layout_again(self, k: int, balance: Sequence[int]) -> Layout:
        layout = self._pipelines[k].layout
        if not isinstance(self.found[k], Programs):
            return layout
        partitions = self.found[k].partitions(balance)
        owners, rank = layout.owners, layout.rank
        return laid_out(self.found[k], partitions, layout.devices, layout.around, owners, rank)

    def _attach(self) -> None:
        for taken, pipeline in zip(self.found, self._pipelines, strict=True):
            taken.attach(pipeline)
