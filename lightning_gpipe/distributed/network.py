"""Chooses the network interface that leads to the other machines.

Gloo uses the interface of the machine's own name, which is often 127.0.0.1: then processes of two
machines wait for one another until they time out.
"""

from __future__ import annotations

import os

from lightning_gpipe.core.transport import addresses_of_interfaces, own_addresses

_VARIABLE = "GLOO_SOCKET_IFNAME"


def choose_interface(main_address: str) -> None:
    """Let Gloo use the interface that leads to the first machine, unless the user has chosen one.

    Raises:
        RuntimeError: If there is none, or more than one.
    """
    if _VARIABLE in os.environ:
        return
    addresses = addresses_of_interfaces()
    try:
        own = own_addresses(main_address)
    except OSError:
        own = []
    names = [name for name, address in addresses.items() if address in own]
    if len(names) != 1:
        listed = ", ".join(f"{name} ({address})" for name, address in addresses.items())
        raise RuntimeError(
            "processes on several machines need the network interface that connects them: found "
            f"{' and '.join(names) or 'none'} for {main_address}, the first machine, among "
            f"{listed}. Set the environment variable {_VARIABLE} to its name on each machine, such "
            f"as {_VARIABLE}=eth0."
        )
    os.environ[_VARIABLE] = names[0]
