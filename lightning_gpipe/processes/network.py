"""Which of a machine's network interfaces leads to the others.

Gloo takes the one that the machine's own name leads to, which is often 127.0.0.1: then processes of
two machines wait for one another until they give up.
"""

from __future__ import annotations

import os
import socket
import struct
import sys

_VARIABLE = "GLOO_SOCKET_IFNAME"
_ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR of Linux


def choose_interface(main_address: str) -> None:
    """Let Gloo use the interface that leads to the first machine, unless the user has chosen one.

    Args:
        main_address: The address of the first machine.

    Raises:
        RuntimeError: If none is found.
    """
    if _VARIABLE in os.environ:
        return
    name = interface_to(main_address)
    if name is None:
        found = ", ".join(name for _, name in socket.if_nameindex())
        raise RuntimeError(
            f"processes on several machines need the network interface that connects them: found "
            f"none that leads to {main_address}, among {found}. Set the environment variable "
            f"{_VARIABLE} to its name on each machine, such as {_VARIABLE}=eth0."
        )
    os.environ[_VARIABLE] = name


def interface_to(address: str) -> str | None:
    """The name of the interface by which this machine reaches ``address``, if there is one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # sends nothing: finds the way
        except OSError:
            return None
        own = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            if _address_of(probe, name) == own:
                return name
    return None


def _address_of(probe: socket.socket, name: str) -> str | None:
    if sys.platform == "win32":
        return None
    import fcntl  # not on Windows

    request = struct.pack("256s", name.encode()[:15])
    try:
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _ADDRESS_OF_INTERFACE, request)[20:24])
    except OSError:  # it has no address
        return None
