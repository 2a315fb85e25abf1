"""The address at which the first process listens, and the others reach it.

torch.distributed would wait for names and listeners without an end, and listen at all addresses.
"""

from __future__ import annotations

import errno
import socket
import time
from datetime import timedelta
from functools import partial

from lightning_gpipe.core.transport.process_group.connecting.address import is_loopback
from lightning_gpipe.core.transport.process_group.connecting.rendezvous import call_with_timeout

_POLL = 0.2  # seconds


def resolve(host: str, timeout: timedelta) -> list[str]:
    """Return the addresses of the first machine, IPv4 before IPv6.

    The name of a container may become known later; a RuntimeError is raised after ``timeout``.
    """
    message = (
        "the first machine must have an address: nobody knows that of "
        f"MASTER_ADDR={host!r}. Check its spelling, and the name server of this machine; no answer"
    )
    return call_with_timeout(timeout, partial(_addresses, host, timeout), message)


def _addresses(host: str, timeout: timedelta) -> list[str]:
    deadline = time.monotonic() + 2 * timeout.total_seconds()  # the caller waits no longer
    while True:
        try:
            answers = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            return [str(each[4][0]) for each in sorted(answers, key=lambda answer: answer[0])]
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_POLL)


def listen(host: str, port: int, timeout: timedelta) -> socket.socket | None:
    """Return a socket that listens at one address of this machine only, by which others reach it.

    None if ``host`` does not tell the address: it is a gateway's, or a loopback one here only.
    """
    addresses = resolve(host, timeout)
    if is_loopback(addresses[0]) and host not in ("localhost", *addresses):
        return None
    family = socket.AF_INET6 if ":" in addresses[0] else socket.AF_INET
    try:
        return socket.create_server((addresses[0], port), family=family)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            return None
        raise RuntimeError(
            f"rank 0 must listen at {host}:{port}, where the other processes look for it: got "
            f"{error.strerror}. If another program uses the port, set MASTER_PORT to a free one."
        ) from error


def wait_for_server(host: str, port: int, timeout: timedelta) -> None:
    """Wait until something listens at an address; raise a RuntimeError if nothing does in time."""
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        try:
            socket.create_connection((host, port), timeout.total_seconds()).close()
        except OSError as error:
            if time.monotonic() > deadline:
                raise RuntimeError(f"nothing listens at {host}:{port}: {error}") from error
            time.sleep(_POLL)
        else:
            return
