"""What each stage of a pipeline keeps for backward, as if it were on a device of its own.

That is what autograd saves while the layers of the stage run, and what enters the stage, until
nothing refers to it. Parameters, buffers and the batch are there anyway and do not count; neither
does what a layer uses and lets go of. A storage that two stages keep counts for both.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
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
    """

    def __init__(self, others: Iterable[Tensor]) -> None:
        self.now = self.peak = 0
        self._others = {each.untyped_storage()._cdata for each in others}
        self._kept: set[int] = set()
        self._lock = threading.RLock()  # a storage may die while another one is counted

    def keep(self, tensors: Iterable[Any]) -> None:
        """Count tensors for as long as their storages live."""
        for each in tensors:
            if isinstance(each, Tensor) and each.dim():
                storage = each.untyped_storage()
                with self._lock:
                    self._add(storage, storage._cdata, storage.nbytes())

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


def kept_bytes(pipeline: GPipe, x: Tensor, step: Callable[[], object]) -> list[int]:
    """The most that each stage keeps at once in a step; it must have made one before.

    Args:
        pipeline: The pipeline; each of its workers keeps on a thread of its own.
        x: The batch.
        step: Runs forward and backward.
    """
    others = [x, *pipeline.parameters(), *pipeline.buffers()]
    keepers = [Keeper(others) for _ in pipeline.stages]
    here = threading.local()
    forward, recompute = StagePass.forward, StagePass.recompute

    @contextmanager
    def at_work(stage_pass: StagePass) -> Iterator[Keeper]:
        here.keeper = keepers[stage_pass.stage.partition.index]
        yield here.keeper
        here.keeper = None

    def entering(self: StagePass, i: int, inputs: Any) -> Any:
        with at_work(self) as keeper:
            keeper.keep(inputs.leaves)
            return forward(self, i, inputs)

    def again(self: StagePass, i: int) -> None:
        with at_work(self):
            recompute(self, i)

    def pack(saved: Tensor) -> Tensor:
        if keeper := getattr(here, "keeper", None):  # None in the caller's code
            keeper.keep([saved])
        return saved.detach()

    with (
        patch.object(StagePass, "forward", entering),
        patch.object(StagePass, "recompute", again),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved),
    ):
        step()
    return [keeper.peak for keeper in keepers]
