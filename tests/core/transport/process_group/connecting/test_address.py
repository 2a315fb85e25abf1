"""The address at which others reach this machine, whatever its own name leads to here."""

import os
import socket
from pathlib import Path

import pytest

from lightning_gpipe.core.transport import choose_interface
from lightning_gpipe.core.transport.process_group.connecting import address

INTERFACES = [("lo", "127.0.0.1"), ("eth0", "10.0.0.1")]


@pytest.fixture(autouse=True)
def undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    """No choice of an interface, before the test and after it.

    Once the choice of a test stayed in the environment, and later fits listened at that interface.
    """
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")  # so that it is restored
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose own name, ``here``, leads to itself only, as in many an /etc/hosts."""

    def look_up(host: str, port: int, **options: object) -> object:
        found = {"here": "127.0.1.1"}.get(host, host)
        return [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", (found, port))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)


def with_interfaces(monkeypatch: pytest.MonkeyPatch, **more: str) -> None:
    monkeypatch.setattr(address, "addresses_of_interfaces", lambda: [*INTERFACES, *more.items()])


@pytest.mark.usefixtures("known")
def test_name_of_this_machine_that_leads_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    with_interfaces(monkeypatch)

    choose_interface("here")

    assert address.own_addresses("here") == ["10.0.0.1"]
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth0"


@pytest.mark.usefixtures("known")
def test_address_that_is_of_this_machine_only(monkeypatch: pytest.MonkeyPatch) -> None:
    with_interfaces(monkeypatch)

    assert address.own_addresses("127.0.0.1") == ["127.0.0.1"]


@pytest.mark.usefixtures("known")
def test_several_networks_are_asked_for_in_plain_words(monkeypatch: pytest.MonkeyPatch) -> None:
    with_interfaces(monkeypatch, docker0="172.17.0.1")

    with pytest.raises(RuntimeError) as error:
        choose_interface("here")

    assert "found eth0 and docker0 for here" in str(error.value)
    assert "Set the environment variable GLOO_SOCKET_IFNAME" in str(error.value)


@pytest.mark.usefixtures("known")
def test_choice_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    with_interfaces(monkeypatch, docker0="172.17.0.1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "docker0")

    choose_interface("here")

    assert os.environ["GLOO_SOCKET_IFNAME"] == "docker0"


def test_interface_that_leads_to_the_others_is_found() -> None:
    assert ("lo", "127.0.0.1") in address.addresses_of_interfaces()
    assert address.own_addresses("localhost")[0] in ("127.0.0.1", "::1")


def test_machine_that_has_ipv6_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Once such a machine was refused: only IPv4 addresses of interfaces were known."""
    lines = [
        "00000000000000000000000000000001 01 80 10 80       lo",
        "fd000000000000000000000000000002 04 40 00 82     eth0",
        "fe8000000000000000fc00fffe000001 04 40 20 80     eth0",
    ]
    file = tmp_path / "if_inet6"
    file.write_text("\n".join(lines), encoding="ascii")
    monkeypatch.setattr(address, "_IPV6", file)
    monkeypatch.setattr(socket, "if_nameindex", list)
    monkeypatch.setattr(address, "own_addresses", lambda other: ["fd00::2"])

    choose_interface("fd00::1")

    assert address.addresses_of_interfaces() == [("lo", "::1"), ("eth0", "fd00::2")]
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth0"


VARIABLES = ("GLOO_SOCKET_IFNAME", "MASTER_ADDR")


@pytest.mark.parametrize(
    "variables, expected",
    [
        ({"GLOO_SOCKET_IFNAME": "eth1,eth0", "MASTER_ADDR": "first"}, "10.0.1.1"),
        ({"MASTER_ADDR": "first"}, "address of first"),
        ({"MASTER_ADDR": "unknown"}, "address of own name"),
        ({}, "address of own name"),
    ],
)
def test_address_of_this_process(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str
) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    interfaces = [("eth0", "10.0.0.1"), ("eth1", "10.0.1.1")]
    monkeypatch.setattr(address, "addresses_of_interfaces", lambda: interfaces)
    monkeypatch.setattr(socket, "gethostname", lambda: "own name")

    def own(host: str) -> list[str]:
        if host == "unknown":
            raise OSError
        return [f"address of {host}"]

    monkeypatch.setattr(address, "own_addresses", own)

    assert address.own_host() == expected


def test_interface_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth9")
    monkeypatch.setattr(address, "addresses_of_interfaces", lambda: [("eth0", "10.0.0.1")])

    with pytest.raises(RuntimeError, match="must name an interface with an address: got 'eth9'"):
        address.own_host()
