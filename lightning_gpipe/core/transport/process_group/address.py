"""The address at which other processes reach this one.

Gloo takes that of the host's name, which is often that of the machine for itself: other machines
then never come through. The address that leads to MASTER_ADDR, which all reach, is the right one.
On the machine that has that name itself, it is again that of the machine for itself; then the
machine's only other address is the right one.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
import sys
from contextlib import suppress
from typing import Any

from torch.distributed.distributed_c10d import ProcessGroupGloo

_ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR of Linux


def device_for() -> Any:
    """What Gloo connects by: the interface that the user chose, or that leads to the others."""
    if interface := os.environ.get("GLOO_SOCKET_IFNAME"):
        return ProcessGroupGloo.create_device(interface=interface.split(",")[0])
    if master := os.environ.get("MASTER_ADDR"):
        with suppress(OSError):  # not to be resolved here
            return ProcessGroupGloo.create_device(hostname=own_addresses(master)[0])
    return ProcessGroupGloo.create_default_device()


def own_addresses(other: str) -> list[str]:
    """The address at which those reach this machine that reach ``other``, or what may be it.

    Args:
        other: The name or the address of a machine that all reach, which may be this one.

    Raises:
        OSError: If none leads there.
    """
    family, kind, _, _, address = socket.getaddrinfo(other, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # of a datagram: nothing is sent
        found = str(probe.getsockname()[0])
    if other == "localhost" or other == address[0] or not _is_loopback(found):
        return [found]
    outside = [each for each in addresses_of_interfaces().values() if not _is_loopback(each)]
    return outside or [found]


def addresses_of_interfaces() -> dict[str, str]:
    """The IPv4 addresses of this machine, by the names of its network interfaces."""
    found: dict[str, str] = {}
    if sys.platform == "win32":
        return found
    import fcntl  # not on Windows

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with suppress(OSError):  # it has no address
                answer = fcntl.ioctl(probe.fileno(), _ADDRESS_OF_INTERFACE, request)
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
