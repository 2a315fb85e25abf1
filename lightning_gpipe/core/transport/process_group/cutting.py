"""Ends what waits for other processes.

A wait for a process that is stopped, or that no network reaches, ends with the timeout of its
process group, which is as long as the user is patient. Nothing else ends one over Gloo, but that
any other wait in the same group does time out: then all of them end.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import ProcessGroupGloo

_TAG = 7_299  # of what nobody sends


def cut(group: Any, other: int) -> None:
    """End all waits in a group over Gloo; it is of no use any more.

    Args:
        group: A ``ProcessGroupGloo``, whose stubs know no ``recv``.
        other: Another rank in it.
    """
    with suppress(RuntimeError):
        nothing = torch.empty(1)
        group.recv([nothing], other, _TAG).wait(timedelta(milliseconds=1))


def end_waits(group: ProcessGroup) -> None:
    """End all waits in a process group with errors; it is of no use any more."""
    for device in group._device_types:
        backend = group._get_backend(device)
        if isinstance(backend, ProcessGroupGloo):
            # A wait for one that has closed its connection fails, but does not time out.
            for other in set(range(group.size())).difference([group.rank()]):
                cut(backend, other)
        else:
            with suppress(RuntimeError):
                backend.abort()
