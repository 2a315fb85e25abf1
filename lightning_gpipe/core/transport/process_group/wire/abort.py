"""Ends waits for other processes.

A wait for a process that is stopped, or that no network reaches, ends with the timeout of its
process group, which is as long as the user is patient. Over Gloo only one thing ends it sooner:
when any wait in a group times out, all waits in that group end.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import ProcessGroupGloo

_TAG = 7_299  # nobody sends with it


def abort_gloo(group: Any, rank: int) -> None:
    """End all waits in a group over Gloo, by a wait for another rank; it is of no use any more."""
    with suppress(RuntimeError):
        group.recv([torch.empty(1)], rank, _TAG).wait(timedelta(milliseconds=1))


def abort_group(group: ProcessGroup) -> None:
    """End all waits in a process group with errors; the group is of no use any more."""
    for device in group._device_types:
        backend = group._get_backend(device)
        if isinstance(backend, ProcessGroupGloo):
            # Each rank is tried: a wait for one that has closed fails, but does not time out.
            for rank in set(range(group.size())).difference([group.rank()]):
                abort_gloo(backend, rank)
        else:
            with suppress(RuntimeError):
                backend.abort()
