"""The address at which other processes reach this one.

That of the host's name is often a loopback address, which other machines cannot reach. The right
one is that of the interface that leads to MASTER_ADDR. On the machine that has that name itself, it
is a loopback address, too; then the machine's only other address is right. The variable by which
users choose an interface for Gloo counts for all connections.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

_VARIABLE = "GLOO_SOCKET_IFNAME"  # the environment variable
_ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR of Linux, for IPv4
_IPV6 = Path("/proc/net/if_inet6")


def own_host() -> str:
    """Return the address of the user's interface, or of the one that leads to the others."""
    name = os.environ.get(_VARIABLE, "").split(",")[0]
    addresses = addresses_of_interfaces() if name else []
    for each, address in addresses:
        if each == name:
            return address
    if addresses:
        raise RuntimeError(f"{_VARIABLE} must name an interface with an address: got {name!r}")
    for host in filter(None, (os.environ.get("MASTER_ADDR"), socket.gethostname())):
        with suppress(OSError):  # the name is unknown here
            return own_addresses(host)[0]
    return "127.0.0.1"


def connecting_on_demand() -> AbstractContextManager[None]:
    """A ``with`` block that makes process groups whose processes connect at the first message."""
    return environment_variable("TORCH_GLOO_LAZY_INIT", "1")


@contextmanager
def environment_variable(name: str, value: str) -> Iterator[None]:
    """A ``with`` block in which an environment variable has another value."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def choose_interface(main_address: str) -> None:
    """Let Gloo use the only interface to the first machine; raise RuntimeError if it is unclear."""
    if _VARIABLE in os.environ:
        return
    addresses = addresses_of_interfaces()
    try:
        own = own_addresses(main_address)
    except OSError:
        own = []
    names = list(dict.fromkeys(name for name, address in addresses if address in own))
    if len(names) != 1:
        listed = ", ".join(f"{name} ({address})" for name, address in addresses)
        raise RuntimeError(
            "processes on several machines need the network interface that connects them: found "
            f"{' and '.join(names) or 'none'} for {main_address}, the first machine, among "
            f"{listed}. Set the environment variable {_VARIABLE} to its name on each machine, such "
            f"as {_VARIABLE}=eth0."
        )
    os.environ[_VARIABLE] = names[0]


def own_addresses(other: str) -> list[str]:
    """Return the address by which machines that reach ``other`` reach this one, or all candidates.

    Raises an OSError if no interface leads to it.
    """
    family, kind, _, _, address = socket.getaddrinfo(other, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # of a datagram: nothing is sent
        own = str(probe.getsockname()[0])
    if other == "localhost" or other == address[0] or not is_loopback(own):
        return [own]
    outside = [each for _, each in addresses_of_interfaces() if not is_loopback(each)]
    return outside or [own]


def addresses_of_interfaces() -> list[tuple[str, str]]:
    """Return the name of a network interface with each address by which others reach it."""
    if sys.platform == "win32":
        return []
    import fcntl  # not on Windows

    addresses: list[tuple[str, str]] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with suppress(OSError):  # it has no address
                answer = fcntl.ioctl(probe.fileno(), _ADDRESS_OF_INTERFACE, request)
                addresses.append((name, socket.inet_ntoa(answer[20:24])))
    with suppress(OSError):  # there is no IPv6
        for line in _IPV6.read_text(encoding="ascii").splitlines():
            digits, *_, name = line.split()
            address = ipaddress.IPv6Address(bytes.fromhex(digits))
            if not address.is_link_local:
                addresses.append((name, str(address)))
    return addresses


def is_loopback(address: str) -> bool:
    """Return True if an address leads to the machine itself, whichever it is."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
