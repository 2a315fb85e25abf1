"""The pipelines in one model: of one module, or several over the same devices and threads."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.utils.hooks import RemovableHandle

from lightning_gpipe.core.layout import Layout, Partition, check_balance
from lightning_gpipe.core.pipeline.deployment import place_all
from lightning_gpipe.core.pipeline.piped_module import PipedModule
from lightning_gpipe.core.pipeline.pipeline import Handles, Pipeline
from lightning_gpipe.core.pipeline.selection import layout_of
from lightning_gpipe.core.run import Timeline
from lightning_gpipe.core.transport import Workers


class Pipelines:
    """A pipeline for each piped module of a model.

    Args:
        modules: The piped modules; calls of them run the pipelines from now on.
        pipelines: The pipeline of each, over the same devices and threads.
    """

    def __init__(self, modules: Sequence[PipedModule], pipelines: Sequence[Pipeline]) -> None:
        self.modules = modules
        self._pipelines = pipelines
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

    def reset_patches(self) -> None:
        """Undo what an interrupted verification left in the layers of any of them."""
        for pipeline in self._pipelines:
            pipeline.reset_patches()

    def release(self) -> None:
        """Let the model run as without a pipeline."""
        for piped in self.modules:
            piped.release()

    def close(self) -> None:
        """End the worker threads."""
        for pipeline in self._pipelines:
            pipeline.close()

    def recut(self, balances: Sequence[Sequence[int]], before: Sequence[Sequence[int]]) -> None:
        """Cut by other balances, and move layers; after an error, restore the balances ``before``.

        Raises:
            TypeError, ValueError: If a balance does not fit; nothing has changed then.
            RuntimeError: If a mini-batch runs, or a device has no room.
        """
        self._check_recut(balances, before)
        self.close()
        self.release()
        try:
            self.make_again(balances, move=True)
        except BaseException:
            self.make_again(before, move=True)
            raise

    def _check_recut(
        self, balances: Sequence[Sequence[int]], before: Sequence[Sequence[int]]
    ) -> None:
        if len(balances) != len(self):
            raise ValueError(
                f"balance must have a list for each module: got {len(balances)} for {len(self)} "
                "modules."
            )
        for piped, balance in zip(self.modules, balances, strict=True):
            check_balance(balance, len(piped.units), piped.name)
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

    def make_again(self, balances: Sequence[Sequence[int]], *, move: bool = False) -> None:
        """Make the programs and pipelines again, by balances, and move the layers if asked."""
        layouts = [
            _new_layout(piped, piped.partitions(balance), pipeline.layout)
            for piped, pipeline, balance in zip(self.modules, self, balances, strict=True)
        ]
        if move:
            place_all(self.modules[0].root, layouts)
        workers = Workers(*layouts)
        pairs = zip(self, layouts, strict=True)
        self._pipelines = [pipeline.again(layout, workers) for pipeline, layout in pairs]
        self._attach()

    def _attach(self) -> None:
        for piped, pipeline in zip(self.modules, self._pipelines, strict=True):
            piped.attach(pipeline)


def _new_layout(piped: PipedModule, partitions: Sequence[Partition], before: Layout) -> Layout:
    """Return the layout of other partitions on the same devices."""
    layout = layout_of(
        piped,
        partitions,
        before.devices,
        before.around,
        before.owners,
        before.rank,
        before.place,
    )
    homes = {parameter: before.homes[parameter] for parameter in before.everywhere}
    return layout.with_everywhere(homes).with_homes(homes)
