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
from multiprocessing.connection import wait

from torch.distributed.distributed_c10d import Store

from lightning_gpipe.core.transport.process_group.connecting.signed_store import (
    SignedStore,
    signature,
)
from lightning_gpipe.core.transport.process_group.wire.tcp_connection import (
    ConnectionBroken,
    TcpConnection,
)

_HELLO = struct.Struct("=q64s")  # of the process that dials: its rank, and the signature
_POLL = 0.05  # seconds
_MOMENT = 0.001  # the same
_DIALLING = 1.0  # the same, for one attempt
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
        self._accepting = threading.Lock()  # and what follows
        self._guests: list[socket.socket] = []  # have dialled, and have not said who they are
        self._lock = threading.RLock()  # of what follows; a garbage collection may abort
        self._connections: dict[int, TcpConnection] = {}
        self._ended = False
        self._store.set(f"{rank}", f"{host} {self._listener.getsockname()[1]} {self._secret}")

    def connection(self, rank: int) -> TcpConnection:
        """Return the connection with a process, which may not be established yet."""
        with self._lock:
            if rank not in self._connections:
                self._connections[rank] = TcpConnection(rank)
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
            self._establish(rank, self._dial(rank, deadline))
        while not connection.established.is_set():
            self._check(deadline, "has not connected")
            if self._accepting.acquire(timeout=_POLL):
                try:
                    if not self._ended:  # nobody listens any more
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
        with self._accepting:  # no thread is in a call of them
            for stream in (self._listener, *self._guests):
                stream.close()

    def _establish(self, rank: int, stream: socket.socket) -> None:
        if not self.connection(rank).establish(stream):
            stream.close()

    def _check(self, deadline: float, what: str) -> None:
        """Raise ConnectionBroken if this process has ended, or the deadline is over."""
        if self._ended:
            raise ConnectionBroken(f"connection closed: {_ENDED}")
        if time.monotonic() > deadline:
            raise ConnectionBroken(f"it {what} within {self._timeout:g} s")

    def _dial(self, rank: int, deadline: float) -> socket.socket:
        while (entry := self._store.get(f"{rank}")) is None:
            self._check(deadline, "has given no address")
            time.sleep(_POLL)
        host, port, secret = entry.split(" ")
        while True:
            try:
                stream = socket.create_connection((host, int(port)), _DIALLING)
                stream.sendall(_HELLO.pack(self.rank, _proof(secret, self.rank)))
                return stream
            except TimeoutError:
                self._check(deadline, f"has not answered at {host}:{port}")
            except OSError as error:
                raise ConnectionBroken(f"no connection to {host}:{port}: {error}") from error

    def _accept(self) -> None:
        """Wait a moment for processes that dial, and hear those that have."""
        for stream in wait([self._listener, *self._guests], _POLL):
            assert isinstance(stream, socket.socket), "all are"
            with suppress(OSError):  # it was closed meanwhile
                if stream is self._listener:
                    self._guests.append(stream.accept()[0])
                else:
                    self._hear(stream)

    def _hear(self, guest: socket.socket) -> None:
        """Establish the connection of one that has said who it is; close that of a stranger."""
        try:
            hello = guest.recv(_HELLO.size, socket.MSG_PEEK)
        except OSError:
            hello = b""
        if 0 < len(hello) < _HELLO.size:  # the rest is on its way
            time.sleep(_MOMENT)
            return
        self._guests.remove(guest)
        rank, proof = _HELLO.unpack(guest.recv(_HELLO.size)) if hello else (-1, b"")
        dials = self.rank < rank < self.size
        if dials and hmac.compare_digest(proof, _proof(self._secret, rank)):
            self._establish(rank, guest)
        else:
            guest.close()


def _proof(secret: str, rank: int) -> bytes:
    return signature(secret, f"{rank}").encode()
