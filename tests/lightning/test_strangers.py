"""Trust: whoever else reaches the ports of a fit runs nothing in it, and does not end it."""

import os
import pickle
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from threading import Event, Thread

import pytest
import torch
from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistError

from tests.lightning.test_start_methods import ROOT
from tests.support.lightning_modules import fitted, weights
from tests.support.models import assert_same
from tests.support.started import Drawing
from tests.support.waiting import PATIENCE

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the ports are those in /proc"),
    pytest.mark.launches,
]


class Calling:
    """Runs a command where it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {self.file}",)


def family(process: int) -> Iterator[int]:
    """The ids of a process and of those that it has started."""
    yield process
    with suppress(OSError):
        for thread in Path(f"/proc/{process}/task").iterdir():
            for child in (thread / "children").read_text(encoding="ascii").split():
                yield from family(int(child))


def listeners(process: int) -> set[tuple[str, int]]:
    """The addresses in hexadecimal, and the ports, at which processes listen."""
    inodes = set()
    for each in family(process):
        with suppress(OSError):
            inodes |= {os.readlink(file) for file in Path(f"/proc/{each}/fd").iterdir()}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                address, _, port = fields[1].partition(":")
                found.add((address, int(port, 16)))
    return found


def intrude(port: int, command: Path, others: list[socket.socket]) -> None:
    """Send garbage and pickles to a port; the connections stay open."""
    for content in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(999), pickle.dumps(Calling(command))):
        with suppress(OSError):
            others.append(socket.create_connection(("127.0.0.1", port), PATIENCE))
            others[-1].sendall(content)


def come_in_place_of_rank_1(port: int, stop: Event) -> None:
    """Write into the store what this package would; only the token is not known."""
    barrier = "lightning_gpipe/start/0-1"
    place = f"{barrier}/0/name"
    # Refused, a store would wait for a part of its timeout, in which the processes may have met.
    while not stop.is_set():
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", port), 1).close()
            break
        time.sleep(0.02)
    with suppress(DistError):  # the store ends with the fit
        store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=PATIENCE), False)
        while not stop.wait(0.02):
            if store.check([place]):
                name = store.get(place).decode().split(" ")[-1]
                store.set(f"{barrier}/{name}/1", f"{'0' * 64} {'a' * 32} ")
                store.set(place, f"{'0' * 64} {'b' * 32}")


def test_strangers_at_all_ports_of_a_fit(tmp_path: Path) -> None:
    file, ran, log = tmp_path / "weights", tmp_path / "ran", tmp_path / "log"
    command = [sys.executable, "-m", "tests.support.started", "popen", str(file)]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    stop = Event()
    impostor = Thread(target=come_in_place_of_rank_1, args=(port, stop))
    others: list[socket.socket] = []
    reached: set[tuple[str, int]] = set()
    variables = os.environ | {"PYTHONPATH": str(ROOT), "MASTER_PORT": str(port)}
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=variables, stderr=output)
    impostor.start()
    deadline = time.monotonic() + 5 * PATIENCE
    while process.poll() is None and time.monotonic() < deadline:
        for address, each in listeners(process.pid) - reached:
            reached.add((address, each))
            intrude(each, ran, others)
        time.sleep(0.02)
    process.kill()
    stop.set()
    impostor.join()
    for other in others:
        other.close()

    said = log.read_text(encoding="utf-8")
    assert process.wait() == 0, said
    assert 1 <= said.count("and is ignored") <= 3, said  # once for each entry and process
    assert len(reached) > 1
    assert {address for address, _ in reached} == {"0100007F"}
    assert not ran.exists()
    found = torch.load(file, weights_only=False)["state_dict"]
    assert_same(dict(found), weights(fitted(tmp_path, build=Drawing)))
