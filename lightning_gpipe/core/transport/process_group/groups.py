"""The process group of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from uuid import uuid4

import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    PrefixStore,
    ProcessGroupGloo,
    _get_default_store,
)

# A rank may pause for as long as it likes: that one is lost is noticed in other ways.
_PATIENCE = timedelta(days=365)


def join_processes(
    owners: Sequence[int] | None, workers: int, group: dist.ProcessGroup | None
) -> tuple[ProcessGroupGloo | None, int]:
    """Make the process group of a pipeline, in all of its processes at once.

    Args:
        owners: For each worker, the rank of the process that runs it; None for this process.
        workers: The number of workers.
        group: The process group of these ranks; None for all processes.

    Returns:
        A group of its own for what the pipeline sends, and the rank of this process in it.

    Raises:
        ValueError: If the owners do not fit the workers or the group.
        RuntimeError: If there is no process group.
    """
    if owners is None:
        return None, 0
    if len(owners) != workers:
        raise ValueError(
            f"owners must have a rank for each worker: got {len(owners)}, owners={list(owners)}, "
            f"for {workers} workers. Give a rank for each device."
        )
    if not dist.is_initialized():
        raise RuntimeError(
            "a pipeline over several processes needs torch.distributed: got owners="
            f"{list(owners)} without a process group. Call torch.distributed.init_process_group() "
            "first, in processes that torchrun has started, or leave owners out."
        )
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    if sorted(set(owners)) != list(range(size)):
        raise ValueError(
            "each process must own a worker, and each owner be a process: got owners="
            f"{list(owners)} for {size} processes. Write the ranks 0 to {size - 1}, each at least "
            "once."
        )
    return _of_its_own(group, rank, size), rank


def _of_its_own(group: dist.ProcessGroup | None, rank: int, size: int) -> ProcessGroupGloo:
    """A group of the same ranks over Gloo, with a longer timeout.

    ``torch.distributed.new_group`` names a group by how many groups the process has had before, in
    which ranks may differ, or it waits for all processes, which may not come.
    """
    name = [uuid4().hex]
    dist.broadcast_object_list(name, group=group, group_src=0)
    store = PrefixStore(f"lightning_gpipe/{name[0]}", _get_default_store())
    return ProcessGroupGloo(store, rank, size, _PATIENCE)
