"""The process group of a pipeline, and one of all processes, which watches them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    PrefixStore,
    Store,
    _get_default_store,
)

from lightning_gpipe.core.transport.interface import OutOfStep, RankFailed
from lightning_gpipe.core.transport.process_group.connecting.address import own_host
from lightning_gpipe.core.transport.process_group.connecting.gpus import GpuTable, over_nccl
from lightning_gpipe.core.transport.process_group.connecting.rendezvous import (
    call_with_timeout,
    store_barrier,
)
from lightning_gpipe.core.transport.process_group.connecting.shared_connections import (
    Connection,
    Peers,
    SharedOffice,
)
from lightning_gpipe.core.transport.process_group.connecting.signed_store import signature
from lightning_gpipe.core.transport.process_group.office import START, Office
from lightning_gpipe.core.transport.process_group.requests import Requests
from lightning_gpipe.core.transport.process_group.tree import Tree
from lightning_gpipe.core.transport.process_group.wire.sockets import Sockets

_LOST_AFTER = timedelta(seconds=30)
_POLL = 0.1  # seconds


def start_timeout(lost_after: timedelta | None) -> timedelta:
    """Return how long a process may take to start, in which it may load a model."""
    return START * (lost_after or _LOST_AFTER)


def rank_among(
    owners: Sequence[int] | None,
    workers: int,
    group: dist.ProcessGroup | None,
    lost_after: timedelta | None = None,
) -> int:
    """Return the rank of this process among the owners of the workers, or 0 if it owns all.

    Raises a ValueError for owners that do not fit, or a wrong ``lost_after``, and a RuntimeError if
    there is no process group.
    """
    if lost_after is not None and (owners is None or lost_after <= timedelta(0)):
        raise ValueError(
            "lost_after must be positive, and is for a pipeline over several processes: got "
            f"lost_after={lost_after!r}, owners={owners}. Leave it out, or give owners and a "
            "datetime.timedelta."
        )
    if owners is None:
        return 0
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
    size = dist.get_world_size(group)
    if sorted(set(owners)) != list(range(size)):
        raise ValueError(
            "each process must own a worker, and each owner be a process: got owners="
            f"{list(owners)} for {size} processes. Write the ranks 0 to {size - 1}, each at least "
            "once."
        )
    return dist.get_rank(group)


def join_processes(
    group: dist.ProcessGroup | None,
    lost_after: timedelta | None,
    pipelines: Sequence[str],
    devices: Mapping[int, torch.device] | None = None,
) -> Connection:
    """Connect the processes of pipelines that are made together.

    A process that may refuse them does so before: the others would lose it while they connect.
    """
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    peers = Peers(dist.group.WORLD, tuple(ranks), lost_after or _LOST_AFTER)
    latest = SharedOffice.enter_latest(peers)
    try:
        shared = _common_office(peers, dist.get_rank(group), latest)
        connection = Connection(shared, pipelines)
        if devices and over_nccl(group):
            store = PrefixStore(f"gpus {connection.first}", _store_of(shared.name))
            connection.gpus = GpuTable(store, devices, peers.lost_after)
        return connection
    finally:
        if latest is not None:
            latest.leave()


class Lifeline:
    """Lets all processes hear this one, and knows which have failed or are lost.

    All processes make it at once; it watches until it is closed or freed. Pipelines over all
    processes with the same ``lost_after`` (None: 30 seconds) share its office.
    """

    def __init__(self, lost_after: timedelta | None = None) -> None:
        self._connection = join_processes(None, lost_after, ())
        self._office = self._connection.office
        # New, for steps are counted from a start that all processes have in common.
        tree = Tree(dist.get_world_size())
        self._requests = self._office.requests = Requests(tree, dist.get_rank())
        self._connection.keep()

    def ask(self, request: str) -> None:
        """Ask all processes to fulfil a request; a signal handler may call this."""
        self._requests.ask(request)

    def end_step(self) -> list[str]:
        """Count a common step; return the requests to fulfil after it.

        Raises RankFailed if that cannot be known, since another process has failed.
        """
        self._requests.end_step()
        while True:
            due = self._requests.due(alone=self._office.absence() is not None)
            if due is not None:
                return due
            if (failure := self._office.failure(_POLL)) is not None:
                raise failure.error(self._office.ranks)

    def tell(self, error: BaseException) -> None:
        self._office.tell(error)

    def was_told(self, error: BaseException) -> bool:
        """Return True if all others know of an error, as from a pipeline over all processes."""
        return self._office.ledger.was_sent(error)

    def failure(self, within: float) -> RankFailed | OutOfStep | None:
        """Return an error that names a process that has failed or ended, or None after a time."""
        failure = self._office.failure(within) or self._office.absence()
        return None if failure is None else failure.error(self._office.ranks)

    def on_lost_wait(self, act: Callable[[], None]) -> None:
        """Call ``act``, a method of a living object, when waiting for a process is in vain."""
        self._office.on_lost_wait(act)

    def close(self) -> None:
        self._connection.close()


def _common_office(peers: Peers, rank: int, latest: SharedOffice | None) -> SharedOffice:
    """Return the latest office of this process if all processes have it, or a new one."""
    store = _store_of()
    offer = "" if latest is None else latest.state

    def check() -> None:
        failure = None if latest is None else latest.office.failure(0.0)
        if failure is not None:
            raise failure.error(peers.ranks)

    purpose = "come to make the pipeline, each with the same owners"
    patience = start_timeout(peers.lost_after)
    message = f"all processes of a pipeline must be connected: rank {rank} got no answer"
    agree = partial(store_barrier, store, peers.ranks, rank, patience, purpose, offer, check)
    # The first process may come last, and then wait itself.
    name = call_with_timeout(3 * patience, agree, message)
    if latest is not None and name == offer:
        return latest
    make = partial(_new_office, _store_of(name), rank, peers)
    return SharedOffice(call_with_timeout(patience, make, message), peers, name)


def _store_of(office: str | None = None) -> Store:
    """Return the store of an office by its name, or the one in which they are agreed on."""
    store = PrefixStore("lightning_gpipe", _get_default_store())
    return store if office is None else PrefixStore(signature(office), store)


def _new_office(store: Store, rank: int, peers: Peers) -> Office:
    """Make an office over connections of its own, which its ``store`` is for alone."""
    addresses, size = PrefixStore("sockets", store), len(peers.ranks)
    sockets: Sockets | None = None
    try:
        sockets = Sockets(addresses, rank, size, own_host(), peers.lost_after)
        return Office(sockets, peers.ranks, peers.lost_after, PrefixStore("channels", store))
    except (OSError, RuntimeError) as error:
        if sockets is not None:
            sockets.abort()
        seconds = peers.lost_after.total_seconds()
        raise RuntimeError(
            f"all processes of a pipeline must be connected within {seconds:g} s: rank {rank} "
            f"could not be: {error}. If another process has failed, its error is the cause; if the "
            "machine has several networks, set GLOO_SOCKET_IFNAME to the interface that reaches "
            "the other machines."
        ) from error
