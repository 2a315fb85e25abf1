"""Where the first process listens, and how the others wait for it."""

import errno
import socket
from collections.abc import Callable
from datetime import timedelta
from threading import Timer

import pytest

from lightning_gpipe.core.transport import listen, resolve, wait_for_server
from lightning_gpipe.core.transport.process_group.connecting import listening
from tests.support.waiting import PATIENCE

LONG, SOON = timedelta(seconds=PATIENCE), timedelta(seconds=0.3)
OF_ALL = [("127.0.0.1", "127.0.0.1"), ("localhost", "127.0.0.1"), ("::1", "::1")]


@pytest.mark.parametrize("host, address", OF_ALL)
def test_it_listens_at_its_own_address_only(host: str, address: str) -> None:
    if ":" in address and not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    listener = listen(host, 0, LONG)

    assert listener is not None
    with listener:
        assert listener.getsockname()[0] == address
        socket.create_connection((host, listener.getsockname()[1]), PATIENCE).close()


def test_port_that_another_program_uses() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(RuntimeError) as error:
            listen("127.0.0.1", port, LONG)

    assert f"rank 0 must listen at 127.0.0.1:{port}" in str(error.value)
    assert "Address already in use" in str(error.value)
    assert "set MASTER_PORT to a free one" in str(error.value)


def answers(*addresses: str) -> Callable[..., object]:
    """A name server that knows these of any name."""
    families = {True: socket.AF_INET6, False: socket.AF_INET}
    return lambda *_, **__: [(families[":" in x], 1, 6, "", (x, 0)) for x in addresses]


def test_name_that_leads_to_this_machine_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others look the name up, too, and get the address of a network."""
    monkeypatch.setattr(socket, "getaddrinfo", answers("127.0.1.1"))

    assert listen("host0", 0, LONG) is None


def test_address_of_a_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", answers("192.0.2.1"))

    assert listen("service", 0, LONG) is None


def test_ipv4_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", answers("fd00::1", "10.0.0.1"))

    assert resolve("host0", LONG) == ["10.0.0.1", "fd00::1"]


def test_name_that_nobody_knows() -> None:
    with pytest.raises(RuntimeError, match="MASTER_ADDR='no-such-machine.invalid'.*within 0.3 s"):
        resolve("no-such-machine.invalid", SOON)


def test_name_that_is_known_a_little_later(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def look_up(*args: object, **_: object) -> object:
        asked.append(args)
        if len(asked) < 3:
            raise socket.gaierror(socket.EAI_NONAME, "unknown")
        return answers("10.0.0.1")()

    monkeypatch.setattr(listening, "_POLL", 0.01)
    monkeypatch.setattr(socket, "getaddrinfo", look_up)

    assert resolve("pod-0", LONG) == ["10.0.0.1"]


def test_server_that_comes_later() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    later: list[socket.socket] = []
    timer = Timer(0.3, lambda: later.append(socket.create_server(("127.0.0.1", port))))
    timer.start()

    wait_for_server("127.0.0.1", port, LONG)
    timer.join()
    later[0].close()


def test_server_that_never_comes() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

    message = f"nothing listens at 127.0.0.1:{port}: .*{errno.ECONNREFUSED}"
    with pytest.raises(RuntimeError, match=message):
        wait_for_server("127.0.0.1", port, SOON)
