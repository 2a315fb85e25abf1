"""How processes find one another, and prove that they are of the same job.

Two processes connect when both want to. The one of higher rank dials, at the address that the other
has written to the store, signed with the token of the job. It proves by the same token, and by a
secret from there, who it is::

    rank 0   listens, writes address and secret         accepts, checks
    rank 1                                       dials: rank, signature
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import threading
import time
from contextlib import suppress
from datetime import timedelta

from torch.distributed.distributed_c10d import Store

from lightning_gpipe.core.transport.process_group.connecting.signed_store import (
    SignedStore,
    signature,
)
from lightning_gpipe.core.transport.process_group.wire.connection import (
    Connection,
    ConnectionBroken,
)

_HELLO = struct.Struct("=q64s")  # of the process that dials: its rank, and the signature
_GREETING = 2.0  # seconds that it may take for that
_POLL = 0.05  # seconds
_ENDED = "this process has ended it"


class Sockets:
    """The connections of one process with others, each of which makes such an object too.

    Args:
        store: A store of these alone, where they find one another.
        rank: The number of this process among them.
        size: How many there are.
        host: The address at which the others reach this process.
        timeout: How long a process may take to connect.
    """

    def __init__(self, store: Store, rank: int, size: int, host: str, timeout: timedelta) -> None:
        self.rank, self.size = rank, size
        self._store = SignedStore(store)
        self._timeout = timeout.total_seconds()
        self._secret = secrets.token_hex()
        family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        self._listener = socket.create_server(address, family=family)
        self._listener.settimeout(_POLL)
        self._accepting = threading.Lock()
        self._lock = threading.Lock()  # of what follows
        self._connections: dict[int, Connection] = {}
        self._ended = False
        self._store.set(f"{rank}", f"{host} {self._listener.getsockname()[1]} {self._secret}")

    def connection(self, rank: int) -> Connection:
        """Return the connection with a process, which may not be established yet."""
        with self._lock:
            if rank not in self._connections:
                self._connections[rank] = Connection(rank)
                if self._ended:
                    self._connections[rank].close(_ENDED)
            return self._connections[rank]

    def connect(self, rank: int) -> None:
        """Wait until the connection with a process is established, which must want it too.

        Raises:
            ConnectionBroken: If it is not in time, or is ended.
        """
        connection, deadline = self.connection(rank), time.monotonic() + self._timeout
        if not connection.established.is_set() and rank < self.rank:
            self._establish(rank, self._dial(rank))
        while not connection.established.is_set():
            if time.monotonic() > deadline:
                raise ConnectionBroken(f"it has not connected within {self._timeout:g} s")
            if self._accepting.acquire(timeout=_POLL):
                try:
                    self._accept()
                finally:
                    self._accepting.release()
        connection.check()

    def abort(self) -> None:
        """End all waits with errors, and the use of the connections."""
        with self._lock:
            self._ended = True
            connections = [*self._connections.values()]
        for connection in connections:
            connection.close(_ENDED)
            connection.join()
        with self._accepting:  # no thread is in a call of it
            self._listener.close()

    def _establish(self, rank: int | None, stream: socket.socket) -> None:
        if rank is None or not self.connection(rank).establish(stream):
            stream.close()

    def _dial(self, rank: int) -> socket.socket:
        host, port, secret = self._address(rank)
        try:
            stream = socket.create_connection((host, int(port)), self._timeout)
            stream.sendall(_HELLO.pack(self.rank, _proof(secret, self.rank)))
        except OSError as error:
            raise ConnectionBroken(f"no connection to {host}:{port}: {error}") from error
        return stream

    def _address(self, rank: int) -> list[str]:
        deadline = time.monotonic() + self._timeout
        while (entry := self._store.get(f"{rank}")) is None:
            if self._ended or time.monotonic() > deadline:
                raise ConnectionBroken(f"it has given no address within {self._timeout:g} s")
            time.sleep(_POLL)
        return entry.split(" ")

    def _accept(self) -> None:
        """Establish one connection, if another process dials soon."""
        with suppress(OSError):  # nobody does, or has closed it, or this process has ended
            stream, _ = self._listener.accept()
            self._establish(self._greeted(stream), stream)

    def _greeted(self, stream: socket.socket) -> int | None:
        """Return the rank of the process that has dialled; None for a stranger."""
        stream.settimeout(_GREETING)
        try:
            hello = stream.recv(_HELLO.size, socket.MSG_WAITALL)
        except OSError:  # it says nothing
            return None
        if len(hello) < _HELLO.size:
            return None
        rank, proof = _HELLO.unpack(hello)
        dials = self.rank < rank < self.size
        return rank if dials and hmac.compare_digest(proof, _proof(self._secret, rank)) else None


def _proof(secret: str, rank: int) -> bytes:
    return signature(secret, f"{rank}").encode()
