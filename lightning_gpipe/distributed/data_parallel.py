"""Rows that users divide among processes, which must be divided among pipelines.

The processes of one pipeline share their batches, which the first one loads, so the parts of the
others would not be read. A sampler or dataset that holds the number of processes is refused. Code
that asks for it where rows are chosen is warned of.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from traceback import walk_stack
from types import FrameType
from typing import Any

import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_warn
from torch.distributed import distributed_c10d

from lightning_gpipe.core.faithful import Attributes, Write
from lightning_gpipe.core.transport import users_line
from lightning_gpipe.distributed.shared_batches import SharedLoader

# Attributes with the parts of dataloaders of PyTorch, torchdata, Lightning and Hugging Face.
_PARTS = (
    *("batch_sampler", "sampler", "base_sampler", "dataset", "root", "source"),
    *("_distributed", "distributed_env"),
)
_SIZES = "num_replicas", "world_size"
_RANKS = "rank", "global_rank"
_NESTED = 6  # parts within parts
_LOADING = SharedLoader._load.__code__
_HOOKS = {f"{stage}_dataloader" for stage in ("train", "val", "test", "predict")}
_VARIABLE = "WORLD_SIZE"
# Modules between the code that asks and its answer, and those that ask for other reasons.
_ASKED = (
    *("os.", "_collections_abc.", "lightning_gpipe."),
    *("torch.distributed.distributed_c10d.", "lightning.pytorch.trainer.trainer."),
)
_ASKING = "torch.", "lightning."


def refuse_world_size(loader: object, world_size: int, replicas: int) -> None:
    """Raise ValueError if a part of a dataloader divides rows by the number of processes."""
    for part in _parts_of(loader, _NESTED):
        for name in _SIZES:
            size = getattr(part, name, None)
            divides = any(isinstance(getattr(part, rank, None), int) for rank in _RANKS)
            if divides and isinstance(size, int) and size == world_size != replicas:
                raise ValueError(
                    "rows must be divided by the number of pipelines, whose processes share their "
                    f"batches: got {type(part).__name__} with {name}={size} for {replicas} in "
                    f"{world_size} processes. Write {name}=trainer.strategy.data_parallel_size and "
                    "rank=trainer.strategy.data_parallel_rank, or leave both to the Trainer."
                )


def _parts_of(owner: object, depth: int) -> Iterator[object]:
    yield owner
    parts = (getattr(owner, name, None) for name in _PARTS if depth)
    for part in parts:
        if part is not None:
            yield from _parts_of(part, depth - 1)


class WorldSizeCalls:
    """Warns, once, of the first code that asks for the number of processes where rows are chosen.

    That is in the hooks that return dataloaders, and in datasets and samplers. It may call
    torch.distributed, ask the Trainer, or read the launcher's variable.
    """

    def __init__(self) -> None:
        self._replicas = 0  # so far nothing is noted

    def watch(self, replicas: int) -> list[Write]:
        """Return the changes of torch.distributed and the environment by which these are noted."""
        self._replicas = replicas
        group_size, variable = distributed_c10d._get_group_size, os._Environ.__getitem__

        def noted(group: Any = None) -> int:
            if group is None or group is dist.group.WORLD:
                self.note("torch.distributed.get_world_size()")
            return group_size(group)

        def noted_variable(environment: os._Environ[str], name: str) -> str:
            if name == _VARIABLE:
                self.note(f"the variable {_VARIABLE}")
            return variable(environment, name)

        return [
            (Attributes(distributed_c10d), "_get_group_size", noted),
            (Attributes(os._Environ), "__getitem__", noted_variable),
        ]

    def release(self) -> None:
        self._replicas = 0

    def note(self, what: str) -> None:
        """Note that the code that called this one, through some libraries, asks for the number."""
        if not self._replicas:
            return
        frames = (frame for frame, _ in walk_stack(sys._getframe()))
        caller = next(frame for frame in frames if not _module_of(frame).startswith(_ASKED))
        if _module_of(caller).startswith(_ASKING):
            return
        around = (frame.f_code for frame, _ in walk_stack(caller))
        if any(code is _LOADING or code.co_name in _HOOKS for code in around):
            replicas, self._replicas = self._replicas, 0
            rank_zero_warn(
                f"{what} is the number of processes, of which those of one pipeline share their "
                f"batches; got a call where rows are chosen, at {users_line(caller)}. To divide "
                f"rows by it is to lose some: write trainer.strategy.data_parallel_size, which is "
                f"{replicas}, and data_parallel_rank."
            )


def _module_of(frame: FrameType) -> str:
    return f"{frame.f_globals.get('__name__', '')}."
