"""Which of a machine's network interfaces leads to the others.

Gloo takes the one that the machine's own name leads to, which is often 127.0.0.1: then processes of
two machines wait for one another until they give up.
"""

from __future__ import annotations

import os

from lightning_gpipe.core.transport import addresses_of_interfaces, own_addresses

_VARIABLE = "GLOO_SOCKET_IFNAME"


def choose_interface(main_address: str) -> None:
    """Let Gloo use the interface that leads to the first machine, unless the user has chosen one.

    Args:
        main_address: The name or the address of the first machine.

    Raises:
        RuntimeError: If none is found, or several are.
    """
    if _VARIABLE in os.environ:
        return
    names = interfaces_to(main_address)
    if len(names) != 1:
        found = ", ".join(f"{name} ({each})" for name, each in addresses_of_interfaces().items())
        raise RuntimeError(
            "processes on several machines need the network interface that connects them: found "
            f"{' and '.join(names) or 'none'} for {main_address}, the first machine, among "
            f"{found}. Set the environment variable {_VARIABLE} to its name on each machine, such "
            f"as {_VARIABLE}=eth0."
        )
    os.environ[_VARIABLE] = names[0]


def interfaces_to(address: str) -> list[str]:
    """The names of the interfaces by which machines that reach ``address`` may reach this one."""
    try:
        own = own_addresses(address)
    except OSError:
        return []
    return [name for name, each in addresses_of_interfaces().items() if each in own]
