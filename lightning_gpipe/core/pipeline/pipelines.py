"""What runs as pipelines in one model: one module, or several over the same devices and threads."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from lightning_gpipe.core.pipeline.pipeline import Handles, Pipeline
from lightning_gpipe.core.pipeline.placing import place_all
from lightning_gpipe.core.pipeline.taken import Programs, Taken
from lightning_gpipe.core.pipeline.taking import laid_out
from lightning_gpipe.core.plan import Layout, Partition, check_balance
from lightning_gpipe.core.run import Timeline
from lightning_gpipe.core.transport import Twins, Workers


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

    def copy_batches(self, root: torch.device) -> Twins | None:
        """Let stages take what is copied to them of a batch that is moved to ``root``.

        Returns:
            What copies it; None if there is nothing to gain.
        """
        first = self[0].layout.device_of(0)
        if self[0].layout.spread or first == root or first.type != "cuda":
            return None
        twins = Twins(first, root)
        for pipeline in self:
            pipeline.engine.twins = twins
        return twins

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

    def recut(self, balances: Sequence[Sequence[int]], before: Sequence[Sequence[int]]) -> None:
        """Cut by other balances, and move the layers whose device is another one then.

        Args:
            balances: The number of units in each stage, of each.
            before: Those of now, to which an error returns.

        Raises:
            TypeError, ValueError: If a balance does not fit; nothing has changed then.
            RuntimeError: If this is no time for it, or a device has no room.
        """
        self._check_recut(balances, before)
        self.close()
        self.release()
        try:
            self._recut(balances)
        except BaseException:
            self._recut(before)
            raise

    def _check_recut(
        self, balances: Sequence[Sequence[int]], before: Sequence[Sequence[int]]
    ) -> None:
        if len(balances) != len(self):
            raise ValueError(
                f"balance must have a list for each module: got {len(balances)} for {len(self)} "
                "modules."
            )
        for taken, each in zip(self.found, balances, strict=True):
            check_balance(each, len(taken.units), taken.name)
        if any(pipeline.layout.spread for pipeline in self):
            raise RuntimeError(
                "a pipeline must run in one process to be cut anew: got one over several, which "
                "keep the values of their own stages only. Save a checkpoint, and resume from it "
                "with another balance."
            )
        if list(map(len, balances)) != list(map(len, before)):
            raise ValueError(
                "a new balance must have as many stages as the pipeline has: got "
                f"{list(map(list, balances))} in the place of {list(map(list, before))}."
            )
        if not all(pipeline.engine.idle for pipeline in self):
            gc.collect()  # a mini-batch that nobody refers to may be in a cycle
        if not all(pipeline.engine.idle for pipeline in self):
            raise RuntimeError(
                "layers must not move while a mini-batch waits for its backward: there is an "
                "output of the pipeline whose graph is alive. Call backward first, or keep "
                "output.detach()."
            )

    def _recut(self, balances: Sequence[Sequence[int]]) -> None:
        """Cut, move, and make the pipelines anew."""
        pairs = list(zip(self.found, self._pipelines, balances, strict=True))
        layouts = [
            _relaid(taken, taken.partitions(balance), pipeline.layout)
            for taken, pipeline, balance in pairs
        ]
        place_all(self.found[0].root, layouts)
        workers = Workers(*layouts)
        self._pipelines = [
            pipeline.again(layout, workers)
            for pipeline, layout in zip(self._pipelines, layouts, strict=True)
        ]
        self._attach()

    def _layout_again(self, k: int, balance: Sequence[int]) -> Layout:
        layout = self._pipelines[k].layout
        if not isinstance(self.found[k], Programs):
            return layout
        return _relaid(self.found[k], self.found[k].partitions(balance), layout)

    def _attach(self) -> None:
        for taken, pipeline in zip(self.found, self._pipelines, strict=True):
            taken.attach(pipeline)


def _relaid(taken: Taken, partitions: Sequence[Partition], before: Layout) -> Layout:
    """The layout of other partitions where there was one before, on the same devices."""
    layout = laid_out(
        taken,
        partitions,
        before.devices,
        before.around,
        before.owners,
        before.rank,
        before.place,
    )
    homes = {parameter: before.homes[parameter] for parameter in before.everywhere}
    return layout.with_everywhere(homes).with_homes(homes)
