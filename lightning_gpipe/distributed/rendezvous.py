"""Starts the process group of all processes, and names ranks that are late, as torch does not."""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import timedelta
from functools import partial
from socket import socket

import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.distributed import _init_dist_connection
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store, _set_pg_timeout
from torch.distributed.rendezvous import rendezvous

from lightning_gpipe.core.transport import (
    call_with_timeout,
    listen,
    signature,
    store_barrier,
    wait_for_server,
)


def start_together(
    environment: ClusterEnvironment,
    backend: str,
    patience: timedelta,
    timeout: timedelta,
    listener: socket | None = None,
) -> None:
    """Make the default process group; all may take ``patience`` to start, then wait ``timeout``."""
    rank = environment.global_rank()
    message = f"all processes must start: rank {rank} got no answer from rank 0"
    # The first process may come last, and then wait for the others for as long again.
    get_store = partial(store_of_all, environment, patience, listener)
    store = call_with_timeout(3 * patience, get_store, message)
    join = partial(_init_dist_connection, environment, backend, store=store, timeout=patience)
    try:
        call_with_timeout(2 * patience, join, message)
    except RuntimeError as error:
        raise RuntimeError(
            f"all processes must be connected within {patience.total_seconds():g} s: rank {rank} "
            f"could not be: {error}. If the machine has several networks, set GLOO_SOCKET_IFNAME "
            "to the interface that reaches the other machines."
        ) from error
    store.set_timeout(timeout)
    _set_pg_timeout(timeout)


def store_of_all(
    environment: ClusterEnvironment, patience: timedelta, listener: socket | None = None
) -> Store:
    """Return the store of all processes, or raise a RuntimeError that names the missing."""
    rank, size = environment.global_rank(), environment.world_size()
    address, port = environment.main_address, environment.main_port
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address, str(port)
    try:
        if dist.is_torchelastic_launched():  # then the launcher has one
            store, _, _ = next(rendezvous("env://", rank, size, timeout=patience))
        elif rank == 0:
            store = _serve(address, port, patience, listener)
        else:
            store = _join(rank, address, port, patience, listener)
        barrier = PrefixStore("lightning_gpipe/start", store)
        # Under a name of its own: torchrun keeps the store of a run that it starts again.
        name = store_barrier(barrier, range(size), rank, patience, "start")
    except dist.DistError as error:
        raise RuntimeError(
            f"all processes must start: rank {rank} has lost rank 0 at {address}:{port}: {error}"
        ) from error
    return PrefixStore(signature(name), store)


def _serve(address: str, port: int, patience: timedelta, listener: socket | None) -> TCPStore:
    # Its constructor can wait for all, too, but does not say for whom.
    def serve(listens: socket | None = None) -> TCPStore:
        number = None if listens is None else listens.detach()
        return TCPStore(address, port, None, True, patience, False, True, number)

    try:
        listener = listener or listen(address, port, patience / 10)
    except RuntimeError:
        with suppress(dist.DistError):
            return serve()  # an earlier store of this process listens there, which is shared
        raise
    return serve(listener)


def _join(
    rank: int, address: str, port: int, patience: timedelta, listener: socket | None
) -> TCPStore:
    until_answer = patience / 10
    if listener is not None:  # of the launcher: it accepts connections before there is a store
        listener.close()
        until_answer = patience
    join = partial(TCPStore, address, port, None, False, patience, wait_for_workers=False)
    try:
        wait_for_server(address, port, patience)
        message = "what listens there may be another program: it gave no answer"
        return call_with_timeout(until_answer, join, message)
    except (RuntimeError, dist.DistError) as error:
        raise RuntimeError(
            f"all processes must start: rank {rank} did not reach rank 0 at {address}:{port}, "
            f"which are MASTER_ADDR and MASTER_PORT: {error}"
        ) from error
