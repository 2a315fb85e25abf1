"""What each stage of a pipeline keeps for backward, as if it were on a device of its own.

That is what autograd saves while the layers of the stage run, and what enters the stage, until
nothing refers to it. Parameters, buffers and the batch are there anyway and do not count; neither
does what a layer uses and lets go of. A storage that two stages keep counts for both, and once for
all together. What autograd saves elsewhere is that of the caller's code: a head, and the loss.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from lightning_gpipe import GPipe
from lightning_gpipe.core.run import StagePass


class Keeper:
    """The storages that a stage keeps.

    Attributes:
        now: Their bytes.
        peak: The most that there were at once.
        most_alive: The most micro-batches at once of which autograd saved anything.
    """

    def __init__(self, others: Iterable[Tensor]) -> None:
        self.now = self.peak = self.most_alive = 0
        self._others = {each.untyped_storage()._cdata for each in others}
        self._kept: set[int] = set()
        self._alive = Counter[int]()  # of each micro-batch, what is saved
        self._lock = threading.RLock()  # a storage may die while another one is counted

    def keep(self, tensors: Iterable[Any]) -> None:
        """Count tensors for as long as their storages live."""
        for each in tensors:
            if isinstance(each, Tensor) and each.dim():
                storage = each.untyped_storage()
                with self._lock:
                    self._add(storage, storage._cdata, storage.nbytes())

    def save(self, saved: _Saved, i: int) -> None:
        """Count a tensor that autograd saves for micro-batch ``i``."""
        self.keep([saved.tensor])
        if saved.tensor.untyped_storage()._cdata not in self._others:
            with self._lock:
                self._alive[i] += 1
                self.most_alive = max(self.most_alive, len(self._alive))
            weakref.finalize(saved, self._end, i).atexit = False

    def _add(self, storage: torch.UntypedStorage, key: int, size: int) -> None:
        if key not in self._kept and key not in self._others:
            self._kept.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._drop, key, size).atexit = False

    def _drop(self, key: int, size: int) -> None:
        with self._lock:
            self._kept.discard(key)
            self.now -= size

    def _end(self, i: int) -> None:
        with self._lock:
            self._alive[i] -= 1
            self._alive += Counter()  # without those of which there is nothing


class _Saved:
    """A tensor that autograd saves, until it lets go of it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()


class Kept(NamedTuple):
    """The most that was kept at once.

    Attributes:
        stages: By each stage, in bytes.
        alive: The micro-batches of which each stage had more than what enters it.
        caller: By the caller's code, in bytes.
        together: By all of these together.
    """

    stages: list[int]
    alive: list[int]
    caller: int
    together: int


def kept(pipeline: GPipe, batch: Iterable[Tensor], step: Callable[[], object]) -> Kept:
    """What is kept at once in a step, at most; the pipeline must have made one before.

    Args:
        pipeline: The pipeline; each of its workers keeps on a thread of its own.
        batch: What is there anyway, with the pipeline's parameters and buffers.
        step: Runs forward and backward.
    """
    others = [*batch, *pipeline.parameters(), *pipeline.buffers()]
    keepers = [Keeper(others) for _ in pipeline.stages]
    caller, together = Keeper(others), Keeper(others)
    here = threading.local()
    forward, recompute = StagePass.forward, StagePass.recompute

    @contextmanager
    def at_work(stage_pass: StagePass, i: int) -> Iterator[Keeper]:
        here.keeper = keepers[stage_pass.stage.partition.index], i
        yield here.keeper[0]
        here.keeper = None

    def entering(self: StagePass, i: int, inputs: Any) -> Any:
        with at_work(self, i) as keeper:
            keeper.keep(inputs.leaves)
            together.keep(inputs.leaves)
            return forward(self, i, inputs)

    def again(self: StagePass, i: int) -> None:
        with at_work(self, i):
            recompute(self, i)

    def pack(tensor: Tensor) -> _Saved:
        saved = _Saved(tensor)
        if at := getattr(here, "keeper", None):
            keeper, i = at
            keeper.save(saved, i)
        else:
            caller.keep([tensor])
        together.keep([tensor])
        return saved

    with (
        patch.object(StagePass, "forward", entering),
        patch.object(StagePass, "recompute", again),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor),
    ):
        step()
    return Kept(
        [keeper.peak for keeper in keepers],
        [keeper.most_alive for keeper in keepers],
        caller.peak,
        together.peak,
    )
