"""The address at which other processes reach this one.

Gloo takes that of the host's name, which is often that of the machine for itself: other machines
then never come through. The address that leads to MASTER_ADDR, which all reach, is the right one.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from typing import Any

from torch.distributed.distributed_c10d import ProcessGroupGloo


def device_for() -> Any:
    """What Gloo connects by: the interface that the user chose, or that leads to the others."""
    if interface := os.environ.get("GLOO_SOCKET_IFNAME"):
        return ProcessGroupGloo.create_device(interface=interface.split(",")[0])
    if master := os.environ.get("MASTER_ADDR"):
        with suppress(OSError):  # not to be resolved here
            return ProcessGroupGloo.create_device(hostname=_own_address(master))
    return ProcessGroupGloo.create_default_device()


def _own_address(other: str) -> str:
    """The address of this machine from which another one is reached."""
    family, kind, _, _, address = socket.getaddrinfo(other, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # of a datagram: nothing is sent
        return str(probe.getsockname()[0])
