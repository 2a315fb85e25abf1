"""Starts the process group of all processes, and names the ranks that do not start.

torch.distributed waits for all as well, for half an hour, but does not say for whom it waited.
"""

from __future__ import annotations

import os
from datetime import timedelta
from functools import partial

import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.distributed import _init_dist_connection
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store, _set_pg_timeout
from torch.distributed.rendezvous import rendezvous

from lightning_gpipe.core.transport import call_with_timeout, store_barrier


def start_together(
    environment: ClusterEnvironment, backend: str, patience: timedelta, timeout: timedelta
) -> None:
    """Make the default process group.

    Args:
        environment: Knows the processes.
        backend: The backend of the group.
        patience: How long a process may take to start.
        timeout: The timeout of the group, once all have started.
    """
    rank = environment.global_rank()
    message = f"all processes must start: rank {rank} got no answer from rank 0"
    # The first process may come last, and then wait for the others for as long again.
    get_store = partial(store_of_all, environment, patience)
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


def store_of_all(environment: ClusterEnvironment, patience: timedelta) -> Store:
    """Return the store by which the processes find one another, once all have started.

    Raises:
        RuntimeError: If some do not start in time; it names them.
    """
    rank, size = environment.global_rank(), environment.world_size()
    address, port = environment.main_address, environment.main_port
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address, str(port)
    try:
        if dist.is_torchelastic_launched():  # then the launcher has one
            store, _, _ = next(rendezvous("env://", rank, size, timeout=patience))
        else:
            # Its constructor can wait for all, too, but does not say for whom.
            store = TCPStore(
                address, port, None, rank == 0, patience, wait_for_workers=False, multi_tenant=True
            )
        barrier = PrefixStore("lightning_gpipe/start", store)
        # Under a name of its own: torchrun keeps the store of a run that it starts again.
        return PrefixStore(store_barrier(barrier, range(size), rank, patience, "start"), store)
    except dist.DistError as error:
        raise RuntimeError(
            f"all processes must start: rank {rank} did not reach rank 0 at {address}:{port}, or "
            f"has lost it again, within {patience.total_seconds():g} s: {error}"
        ) from error
