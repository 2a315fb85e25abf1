"""Connections between processes, here of groups on threads of one; also ``tcp_connection``."""

import gc
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from random import Random
from unittest.mock import Mock

import pytest
from torch._C._distributed_c10d import HashStore

from lightning_gpipe.core.transport.process_group.connecting.signed_store import TOKEN, SignedStore
from lightning_gpipe.core.transport.process_group.wire import tcp_connection
from lightning_gpipe.core.transport.process_group.wire.sockets import _HELLO, Sockets, _proof
from lightning_gpipe.core.transport.process_group.wire.tcp_connection import (
    ConnectionBroken,
    TcpConnection,
)
from tests.support.waiting import NEVER, PATIENCE, awaited

LONG, FOREVER = timedelta(seconds=PATIENCE), timedelta(seconds=NEVER)
THRESHOLDS = gc.get_threshold()
MUCH = 1 << 25  # bytes, more than sockets take by themselves


@contextmanager
def two(timeout: timedelta = LONG, host: str = "127.0.0.1") -> Iterator[list[Sockets]]:
    """The connections of two processes that may find one another."""
    store = HashStore()
    made = [Sockets(store, rank, 2, host, timeout) for rank in range(2)]
    try:
        yield made
    finally:
        for each in made:
            each.abort()


@contextmanager
def connected(host: str = "127.0.0.1") -> Iterator[list[TcpConnection]]:
    with two(host=host) as made, ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda each: each.connect(1 - each.rank), made))
        yield [each.connection(1 - each.rank) for each in made]


def content(size: int, first: int = 0) -> memoryview:
    return memoryview(bytes(range(256)) * (size // 256 + 2))[first : first + size]


def read(end: TcpConnection, size: int) -> bytes:
    room = bytearray(size)
    end.read(memoryview(room))
    return bytes(room)


def error_of(run: Callable[[], object]) -> str:
    with pytest.raises(ConnectionBroken) as caught:
        run()
    return str(caught.value)


@pytest.mark.parametrize("sender", [0, 1])
@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "by the thread"])
def test_bytes_come_in_order(monkeypatch: pytest.MonkeyPatch, sender: int, at_once: bool) -> None:
    """However they are cut where they are sent, and where they are read."""
    monkeypatch.setattr(tcp_connection, "_AT_ONCE", at_once)
    random = Random(sender)
    sizes = [1, 70_000, 0, 3_000_000, 17, *(random.randrange(200_000) for _ in range(50))]
    sent = [
        ([content(n % 7), content(n, n % 256)], [content(k)] * (k % 3)) for k, n in enumerate(sizes)
    ]
    whole = b"".join(part for small, large in sent for part in (*small, *large))
    with connected() as ends, ThreadPoolExecutor(1) as pool:

        def read_all() -> bytes:
            found, left = list[bytes](), len(whole)
            while left:
                found.append(read(ends[1 - sender], min(left, random.randrange(200_000))))
                left -= len(found[-1])
            return b"".join(found)

        came = pool.submit(read_all)
        sends = [ends[sender].send(*parts) for parts in sent]

        assert came.result(PATIENCE) == whole
        for send in sends:
            assert send is None or (send.wait(PATIENCE) and send.failure is None)


def test_message_in_many_parts() -> None:
    """More than one system call takes."""
    parts = [content(3, k % 256) for k in range(5_000)]
    with connected() as (first, second):
        first.send(parts[:9], parts[9:])

        assert read(second, 15_000) == b"".join(parts)


def test_two_send_more_at_once_than_sockets_take() -> None:
    """Neither may wait for the other to read: a thread that receives also sends."""
    with connected() as ends:
        sends = [end.send([], [content(MUCH, k)]) for k, end in enumerate(ends)]

        with ThreadPoolExecutor(2) as pool:
            came = list(pool.map(lambda end: read(end, MUCH), ends))
        for k, send in enumerate(sends):
            assert send is not None and send.wait(PATIENCE) and send.failure is None
            assert came[1 - k] == content(MUCH, k)


def test_what_is_left_of_a_copy_may_be_changed() -> None:
    own = bytearray(content(MUCH))
    with connected() as (first, second):
        assert first.send([memoryview(own)]) is not None

        own[:] = bytes(MUCH)

        assert read(second, MUCH) == content(MUCH)


class Memory(bytearray):
    """Bytes that may be referred to weakly."""


def test_what_is_sent_is_freed() -> None:
    """Once copies of sixteen mini-batches were kept, so the heap grew by 67 MB."""
    with connected() as (first, second):
        memory = Memory(MUCH)
        freed = weakref.ref(memory)
        first.send([], [memoryview(memory)])
        del memory

        read(second, MUCH)

        assert awaited(lambda: freed() is None, True)
        assert not first.waits


def test_interrupt_while_a_part_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes after it would be misread: the other process learns that this one is lost."""
    with connected() as (first, second):
        monkeypatch.setattr(first, "_send_queue", Mock(side_effect=KeyboardInterrupt))

        with pytest.raises(KeyboardInterrupt):
            first.send([], [content(MUCH)])

        assert "KeyboardInterrupt" in error_of(lambda: first.send([content(1)]))
        assert "connection closed" in error_of(lambda: read(second, MUCH))


class SendsWhenFreed:
    """Garbage that sends when it is collected, as the end of a pipeline does."""

    def __init__(self, end: TcpConnection) -> None:
        self.cycle = self
        self.end = end

    def __del__(self) -> None:
        self.end.send([memoryview(b"C" * 64)])


def test_garbage_that_is_collected_while_a_part_is_sent() -> None:
    """Once its message came in the middle of the other one."""
    with connected() as (first, second):
        for turn in range(40):
            gc.collect()
            SendsWhenFreed(first)
            gc.set_threshold(1 + turn)
            try:
                first.send([], [memoryview(b"x" * (MUCH // 4))])
            finally:
                gc.set_threshold(*THRESHOLDS)
            gc.collect()

            assert read(second, MUCH // 4 + 64).find(b"C" * 64) in (0, MUCH // 4)


def test_sends_before_there_is_a_connection() -> None:
    with two() as (first, second):
        waiting = second.connection(0).send([content(5)])
        assert waiting is not None and not waiting.wait(0.01)
        assert second.connection(0).waits

        second.connect(0)
        first.connect(1)

        assert read(first.connection(1), 5) == content(5)
        assert waiting.wait(PATIENCE)


def _read(end: TcpConnection) -> None:
    read(end, 1)


def _send(end: TcpConnection) -> None:
    send = end.send([], [content(MUCH)])
    assert send is not None and send.wait(NEVER)
    if send.failure is not None:
        raise ConnectionBroken(send.failure)


@pytest.mark.parametrize("waits", [_read, _send])
@pytest.mark.parametrize("ends", [0, 1])
def test_end_of_either_ends_a_wait(waits: Callable[[TcpConnection], None], ends: int) -> None:
    with two() as made, ThreadPoolExecutor(1) as pool:
        list(pool.map(lambda each: each.connect(1 - each.rank), reversed(made)))
        end = made[0].connection(1)
        waiting = pool.submit(error_of, lambda: waits(end))

        made[ends].abort()

        assert "connection closed" in waiting.result(PATIENCE)
        assert "connection closed" in error_of(lambda: waits(end))


def test_last_bytes_of_a_process_that_has_ended() -> None:
    with two() as made, ThreadPoolExecutor(1) as pool:
        list(pool.map(lambda each: each.connect(1 - each.rank), reversed(made)))
        made[1].connection(0).send([content(9)])
        made[1].abort()

        assert read(made[0].connection(1), 9) == content(9)
        assert "connection closed" in error_of(lambda: read(made[0].connection(1), 1))


@pytest.mark.parametrize("rank", [0, 1])
def test_end_ends_a_wait_for_a_process_to_connect(rank: int) -> None:
    made = Sockets(HashStore(), rank, 2, "127.0.0.1", FOREVER)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(error_of, lambda: made.connect(1 - rank))

        made.abort()

        assert waiting.result(PATIENCE)
        assert "has ended it" in error_of(lambda: made.connect(1 - rank))


@pytest.mark.parametrize("rank, what", [(0, "has not connected"), (1, "has given no address")])
def test_process_that_does_not_come(rank: int, what: str) -> None:
    made = Sockets(HashStore(), rank, 2, "127.0.0.1", timedelta(seconds=0.1))

    assert f"it {what} within 0.1 s" in error_of(lambda: made.connect(1 - rank))

    made.abort()


def test_process_whose_address_leads_nowhere() -> None:
    store = HashStore()
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
    SignedStore(store).set("0", f"127.0.0.1 {port} secret")
    made = Sockets(store, 1, 2, "127.0.0.1", LONG)

    assert f"no connection to 127.0.0.1:{port}" in error_of(lambda: made.connect(0))

    made.abort()


def of_another_job(secret: str) -> bytes:
    """It reads the store, but has not the token with which to sign."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(TOKEN, "theirs")
        return _HELLO.pack(1, _proof(secret, 1))


HELLOS: dict[str, Callable[[str], bytes]] = {
    "nothing": lambda secret: b"",
    "another secret": lambda secret: _HELLO.pack(1, _proof("another", 1)),
    "for another rank": lambda secret: _HELLO.pack(1, _proof(secret, 0)),
    "a rank that does not dial": lambda secret: _HELLO.pack(0, _proof(secret, 0)),
    "another job": of_another_job,
}


@pytest.mark.parametrize("says", HELLOS.values(), ids=HELLOS)
def test_stranger_that_connects(says: Callable[[str], bytes]) -> None:
    with two() as (first, second):
        stranger = socket.create_connection(first._listener.getsockname())
        stranger.sendall(says(first._secret))

        second.connect(0)
        second.connection(0).send([content(3)])

        first.connect(1)
        assert read(first.connection(1), 3) == content(3)
        stranger.close()


def test_process_that_pauses_while_it_says_who_it_is() -> None:
    """Once it was taken for a stranger, and closed for good; others that say nothing wait, too."""
    with two() as (first, _), ThreadPoolExecutor(1) as pool:
        address = first._listener.getsockname()
        *silent, slow = [socket.create_connection(address) for _ in range(4)]
        waiting = pool.submit(first.connect, 1)
        hello = _HELLO.pack(1, _proof(first._secret, 1))
        for part in hello[:9], hello[9:]:
            time.sleep(0.2)
            assert not waiting.done()
            slow.sendall(part)

        waiting.result(PATIENCE)

        slow.sendall(b"welcome")
        assert read(first.connection(1), 7) == b"welcome"
        for each in (slow, *silent):
            each.close()


def test_end_while_a_process_dials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it went on for as long as a process may take."""
    monkeypatch.setattr(f"{Sockets.__module__}._DIALLING", 0.1)
    store = HashStore()
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, ThreadPoolExecutor(1) as pool:
        taken = [socket.socket() for _ in range(4)]  # more than it has room for
        for each in taken:
            each.setblocking(False)
            each.connect_ex(full.getsockname())
        SignedStore(store).set("0", f"127.0.0.1 {full.getsockname()[1]} secret")
        made = Sockets(store, 1, 2, "127.0.0.1", FOREVER)
        waiting = pool.submit(error_of, lambda: made.connect(0))
        assert not waiting.done()

        made.abort()

        assert "connection closed" in waiting.result(PATIENCE)
        for each in taken:
            each.close()


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="needs IPv6")
def test_ipv6() -> None:
    with connected("::1") as (first, second):
        first.send([content(3)])

        assert read(second, 3) == content(3)


def test_nothing_is_left() -> None:
    threads, files = set(threading.enumerate()), len(os.listdir("/dev/fd"))
    with connected() as (first, second):
        first.send([], [content(MUCH)])
        read(second, 1)

    left = set(threading.enumerate()) - threads
    assert not [each.name for each in left if each.name.startswith("gpipe")]
    del first, second
    assert awaited(lambda: len(os.listdir("/dev/fd")), files) == files
