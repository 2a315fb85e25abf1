"""A stream of bytes to and from one other process, over TCP.

The thread that sends writes to the socket, and the one that receives reads from it, so a message
takes a system call or two of each process. What the socket does not take at once goes to a thread,
as does what is sent before there is a socket::

    sender    bytes ----------------> socket            returns at once
              the rest --> queue ---> thread            waits for the socket
"""

from __future__ import annotations

import socket
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

_AT_ONCE = hasattr(socket.socket, "sendmsg")  # not on Windows, where the thread sends all
_MOST_PARTS = 512  # of one system call, which may refuse more than 1,024
_BUFFER = 1 << 16  # bytes that are read ahead; more are read to where they belong
_JOIN = 1.0  # seconds


class ConnectionBroken(RuntimeError):
    """Raised where a connection to another process has ended."""


class Send:
    """Bytes that the socket has not taken at once; ``failure`` says why it never will."""

    def __init__(self, parts: Sequence[memoryview]) -> None:
        self.parts = parts
        self.failure: str | None = None
        self._lasts = threading.Lock()  # held until it ends; most end at once, and need no event
        self._lasts.acquire()

    def end(self, failure: str | None = None) -> None:
        self.failure = failure
        self.parts = ()
        self._lasts.release()

    def wait(self, seconds: float) -> bool:
        """Wait some seconds for its end, by a failure too; return whether it has ended."""
        ended = self._lasts.acquire(timeout=seconds)
        if ended:
            self._lasts.release()
        return ended


class TcpConnection:
    """The connection with process ``rank``: bytes arrive in the order in which they are sent.

    ``established`` is set once there is a socket, or will be none.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._lock = threading.RLock()  # of what follows
        self._stream: socket.socket | None = None
        self._queue: deque[Send] = deque()  # the first is being sent
        self._writes = False  # while there is a queue, and a thread that sends it
        self._writer: threading.Thread | None = None
        self._error: str | None = None
        self.established = threading.Event()
        self._ahead = memoryview(b"")  # bytes that were read, and belong to what comes next
        self._buffer = memoryview(bytearray(_BUFFER))

    def establish(self, stream: socket.socket) -> bool:
        """Use a socket from now on; return False if there is one, or there will be none."""
        with self._lock:
            if self.established.is_set():
                return False
            stream.settimeout(None)
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._stream = stream
            # Not before: a thread may be in a call of it. Nor at exit, before the ends are told.
            weakref.finalize(self, stream.close).atexit = False
            self.established.set()
            self._send_queue()
        return True

    @property
    def waits(self) -> bool:
        """True if something is left to send."""
        return bool(self._queue)

    def send(self, small: Sequence[memoryview], large: Sequence[memoryview] = ()) -> Send | None:
        """Send bytes without waiting; return what is left of it, or None.

        The ``large`` ones must stay unchanged until all is sent; small ones are copied if need be.

        Raises:
            ConnectionBroken: If the connection has ended.
        """
        with self._lock:
            self.check()
            send = Send([*small, *large])
            try:
                # Before a part of it is sent: a garbage collection may send more meanwhile.
                self._queue.append(send)
                if self._queue[0] is send:
                    self._send_now(send)
                self.check()
                if not send.parts:
                    self._queue.popleft()
                    return None
                apart = max(0, len(send.parts) - len(large))
                send.parts = [memoryview(b"".join(send.parts[:apart])), *send.parts[apart:]]
                self._send_queue()
            except BaseException as error:  # Ctrl-C too: what comes after a part would be misread
                self.close(f"{error!r}")
                raise
        return send

    def _send_now(self, send: Send) -> None:
        """Send as much as the socket takes, and keep the rest."""
        if self._stream is None or not _AT_ONCE:
            return
        parts = send.parts
        try:
            sent = self._stream.sendmsg(parts[:_MOST_PARTS], (), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError as error:
            self.close(f"{error}")
            return
        for k, part in enumerate(parts):
            if sent < len(part):
                send.parts = [part[sent:], *parts[k + 1 :]]
                return
            sent -= len(part)
        send.parts = ()

    def _send_queue(self) -> None:
        if not self._writes and self._queue and self._stream is not None:
            self._writes = True
            name = f"gpipe-to-rank-{self._rank}"
            self._writer = threading.Thread(target=self._write, name=name, daemon=True)
            self._writer.start()

    def _write(self) -> None:
        while self._write_first():
            pass

    def _write_first(self) -> bool:
        """Send the first of the queue, and keep nothing of it; return False if there is none."""
        with self._lock:
            if not self._queue:
                self._writes = False
                return False
            parts, stream = self._queue[0].parts, self._stream
        assert stream is not None, "there is one before the thread"
        try:
            for part in parts:
                stream.sendall(part)
        except OSError as error:
            self.close(f"{error}")
        with self._lock:
            if self._error is None:
                self._queue.popleft().end()
        return True

    def read(self, room: memoryview) -> None:
        """Fill a buffer with the next bytes, however long that takes.

        Raises:
            ConnectionBroken: If the connection ends before.
        """
        while room:
            if not self._ahead and len(room) < _BUFFER:
                self._ahead = self._buffer[: self._receive(self._buffer)]
            count = min(len(self._ahead), len(room)) or self._receive(room)
            if self._ahead:
                room[:count] = self._ahead[:count]
                self._ahead = self._ahead[count:]
            room = room[count:]

    def _receive(self, room: memoryview) -> int:
        assert self._stream is not None, "it is established"
        try:
            count = self._stream.recv_into(room)
        except OSError as error:
            raise ConnectionBroken(f"connection closed: {error}") from error
        if not count:
            raise ConnectionBroken("connection closed")
        return count

    def close(self, why: str) -> None:
        """End all waits, also those that begin later, with errors."""
        with self._lock:
            if self._error is not None:
                return
            self._error = f"connection closed: {why}"
            for send in self._queue:
                send.end(self._error)
            self._queue.clear()
            self.established.set()
            if self._stream is not None:
                with suppress(OSError):  # the other process has closed it
                    self._stream.shutdown(socket.SHUT_RDWR)

    def check(self) -> None:
        """Raise ConnectionBroken if it has ended."""
        if self._error is not None:
            raise ConnectionBroken(self._error)

    def join(self) -> None:
        """Wait for the thread to end, after :meth:`close`."""
        writer = self._writer
        if writer is not None and writer is not threading.current_thread() and writer.is_alive():
            writer.join(_JOIN)
