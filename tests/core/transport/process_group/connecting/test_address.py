"""The address at which others reach this machine, whatever its own name leads to here."""

import os
import socket

import pytest

from lightning_gpipe.core.transport import choose_interface
from lightning_gpipe.core.transport.process_group.connecting import address

INTERFACES = [("lo", "127.0.0.1"), ("eth0", "10.0.0.1")]


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose own name, ``here``, leads to itself only, as in many an /etc/hosts."""

    def look_up(host: str, port: int, **options: object) -> object:
        found = {"here": "127.0.1.1"}.get(host, host)
        return [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", (found, port))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)


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
