"""The process group of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    PrefixStore,
    ProcessGroupGloo,
    Store,
    _get_default_store,
)

from lightning_gpipe.core.transport.interface import RankFailed
from lightning_gpipe.core.transport.process_group.address import device_for
from lightning_gpipe.core.transport.process_group.bounded import within
from lightning_gpipe.core.transport.process_group.meeting import meet
from lightning_gpipe.core.transport.process_group.office import START, Office
from lightning_gpipe.core.transport.process_group.sharing import Connection, Place, Shared

_LOST_AFTER = timedelta(seconds=30)


def patience_of(lost_after: timedelta | None) -> timedelta:
    """How long a process may take to start, in which it may load a model.

    Args:
        lost_after: After how long a process that is not heard is lost; None for 30 seconds.
    """
    return START * (lost_after or _LOST_AFTER)


def join_processes(
    owners: Sequence[int] | None,
    workers: int,
    group: dist.ProcessGroup | None,
    lost_after: timedelta | None = None,
    pipelines: Sequence[str] = ("module",),
) -> tuple[Connection | None, int]:
    """Make the process group of a pipeline, in all of its processes at once.

    Args:
        owners: For each worker, the rank of the process that runs it; None for this process.
        workers: The number of workers.
        group: The process group of these ranks; None for all processes.
        lost_after: After how long a process that is not heard is lost; None for 30 seconds.
        pipelines: The names of those that are made together.

    Returns:
        A connection for what the pipeline sends, and the rank of this process in it.

    Raises:
        ValueError: If the owners do not fit the workers or the group, or ``lost_after`` is not
            positive.
        RuntimeError: If there is no process group, or others do not come.
    """
    if lost_after is not None and (owners is None or lost_after <= timedelta(0)):
        raise ValueError(
            "lost_after must be positive, and is for a pipeline over several processes: got "
            f"lost_after={lost_after!r}, owners={owners}. Leave it out, or give owners and a "
            "datetime.timedelta."
        )
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
    return connect(group, lost_after, pipelines), rank


def connect(
    group: dist.ProcessGroup | None, lost_after: timedelta | None, pipelines: Sequence[str]
) -> Connection:
    """Connect the processes of a group, all at once.

    Args:
        group: The group; None for all processes.
        lost_after: After how long a process that is not heard is lost; None for 30 seconds.
        pipelines: The names of the pipelines over them.

    Raises:
        RuntimeError: If others do not come.
    """
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    place = Place(dist.group.WORLD, tuple(ranks), lost_after or _LOST_AFTER)
    found = Shared.held_at(place)
    try:
        return Connection(_shared(place, dist.get_rank(group), found), pipelines)
    finally:
        if found is not None:
            found.leave()


def _shared(place: Place, rank: int, found: Shared | None) -> Shared:
    """The office of the pipelines there: the one found here if all processes have it, or a new one.

    Args:
        place: Where it is.
        rank: That of this process in the group.
        found: What this process has.
    """
    store = PrefixStore("lightning_gpipe", _get_default_store())
    offered = "" if found is None else found.state

    def check() -> None:
        failure = None if found is None else found.office.failure(0.0)
        if failure is not None:
            raise RankFailed(failure.text(place.ranks))

    purpose = "come to make the pipeline, each with the same owners"
    patience = patience_of(place.lost_after)
    unanswered = f"all processes of a pipeline must be connected: rank {rank} got no answer"
    come = partial(meet, store, place.ranks, rank, patience, purpose, offered, check)
    name = within(3 * patience, come, unanswered)  # the first may come last, and then wait itself
    if found is not None and name == offered:
        return found
    members = PrefixStore(name, store), rank, len(place.ranks), place.lost_after
    group = within(patience, partial(_connected, *members), unanswered)
    return Shared(Office(group, place.lost_after), place, name)


def _connected(store: Store, rank: int, size: int, lost_after: timedelta) -> ProcessGroupGloo:
    """A group of these processes over Gloo.

    ``torch.distributed.new_group`` names a group by how many groups the process has had before, in
    which ranks may differ, or it waits for all processes, which may not come.
    """
    gloo: Any = ProcessGroupGloo  # whose stubs know no options
    options = gloo._Options()
    options._timeout = lost_after
    options._devices = [device_for()]
    try:
        return ProcessGroupGloo(store, rank, size, options)
    except RuntimeError as error:
        seconds = lost_after.total_seconds()
        raise RuntimeError(
            f"all processes of a pipeline must be connected within {seconds:g} s: rank {rank} "
            f"could not be: {error}. If the machine has several networks, set GLOO_SOCKET_IFNAME "
            "to the interface that reaches the other machines."
        ) from error
