"""Two machines, as network namespaces of this one, joined by a veth pair.

All of it is made in a sandbox that `python -m tests.multihost` enters first: namespaces of the
kernel that end with their first process. So whatever happens to a test, nothing is left on the
machine: no process, no interface, no name.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from shutil import which

from tests.support.waiting import awaited

INSIDE = "GPIPE_TEST_MACHINES"  # set in the sandbox
SANDBOX = ["--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
# As the first process, which must wait for whatever loses its parent; `ip` writes names to /run.
FIRST = 'mount -t tmpfs tmpfs /run && "$@"'
# Each machine has its own name, and looks names up in its own file only: nobody else would answer.
BOOT = """hostname "$1" && mount --bind "$2/hosts" /etc/hosts &&
mount --bind "$2/nsswitch.conf" /etc/nsswitch.conf &&
mount --bind "$2/resolv.conf" /etc/resolv.conf && shift 2 && exec "$@"
"""


class Machine:
    """A machine: an address, a name, a file of hosts.

    Args:
        k: Its number.
        folder: Where its files are.
    """

    def __init__(self, k: int, folder: Path) -> None:
        self.name = f"host{k}"
        self.addresses = {4: f"10.77.0.{k + 1}", 6: f"fd77::{k + 1}"}
        self.port = f"net{k}"  # its end of the cable
        self._etc = folder / self.name
        self._etc.mkdir()
        nobody = "nameserver 10.77.0.99\noptions timeout:2 attempts:1\n"
        (self._etc / "resolv.conf").write_text(nobody, encoding="utf-8")
        self.ask("files")

    def start(self, command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        """Run a command here; what it prints goes to a file."""
        boot = ["unshare", "--uts", "sh", "-c", BOOT, "sh", self.name, str(self._etc)]
        with log.open("ab") as file:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.name, *boot, *command],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def know(self, hosts: str) -> None:
        """Look names up in this text from now on."""
        (self._etc / "hosts").write_text(hosts, encoding="utf-8")

    def ask(self, services: str) -> None:
        """Look names up there, such as ``dns``: a name server that does not answer."""
        (self._etc / "nsswitch.conf").write_text(f"hosts: {services}\n", encoding="utf-8")

    def processes(self) -> list[int]:
        """The ids of all processes that run here."""
        return [int(each) for each in _run("ip", "netns", "pids", self.name).split()]

    def configure(self, *what: str) -> None:
        """Run the ``ip`` tool here."""
        _run("ip", "-n", self.name, *what)


class Machines:
    """Two machines and the cable between them."""

    def __init__(self, folder: Path) -> None:
        self.both = [Machine(k, folder) for k in range(2)]
        for machine in self.both:
            _run("ip", "netns", "add", machine.name)
        first, second = self.both
        cable = ("type", "veth", "peer", "name", second.port, "netns", second.name)
        first.configure("link", "add", first.port, *cable)
        for machine in self.both:
            machine.configure("link", "set", "lo", "up")
            machine.configure("link", "set", machine.port, "up")
        self.address(4)

    def address(self, version: int) -> None:
        """Let each have one address, of a version of the protocol."""
        for machine in self.both:
            machine.configure("address", "flush", "dev", machine.port, "scope", "global")
            own = f"{machine.addresses[version]}/{ {4: 24, 6: 64}[version] }"
            nodad = ["nodad"] if version == 6 else []  # at once
            machine.configure("address", "add", own, "dev", machine.port, *nodad)
        self.know_one_another(version)

    def know_one_another(self, version: int = 4) -> None:
        """Let each know the names of both.

        With IPv4, its own name leads to itself only, as the installers of several distributions
        have it.
        """
        for machine in self.both:
            others = [
                f"{each.addresses[version]} {each.name}"
                for each in self.both
                if each is not machine
            ]
            itself = {4: "127.0.1.1", 6: machine.addresses[6]}[version]
            own = [f"{ {4: '127.0.0.1', 6: '::1'}[version] } localhost", f"{itself} {machine.name}"]
            machine.know("\n".join([*own, *others, ""]))

    def unplug(self) -> None:
        """Let nothing pass between them."""
        self.both[0].configure("link", "set", self.both[0].port, "down")

    def plug(self) -> None:
        """Let everything pass again."""
        self.both[0].configure("link", "set", self.both[0].port, "up")

    def processes(self) -> list[int]:
        """The ids of all processes that run on them."""
        return [process for machine in self.both for process in machine.processes()]

    def reset(self) -> None:
        """End what still runs on them, and connect them."""
        for process in self.processes():
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                continue
        assert awaited(lambda: len(self.processes()), 0) == 0
        self.plug()
        self.address(4)
        for machine in self.both:
            machine.ask("files")

    def remove(self) -> None:
        """Remove them."""
        self.reset()
        for machine in self.both:
            _run("ip", "netns", "delete", machine.name)


@contextmanager
def two_machines(folder: Path) -> Iterator[Machines]:
    """Two machines, removed in the end.

    Raises:
        RuntimeError: If this is not the sandbox.
    """
    if INSIDE not in os.environ:
        raise RuntimeError(
            "two machines are made of namespaces, in a sandbox of their own: run `make "
            "test-multihost`, or `python -m tests.multihost -k ...` for some of the tests."
        )
    machines = Machines(folder)
    try:
        yield machines
    finally:
        machines.remove()


def enter(command: Sequence[str]) -> None:
    """Run a command in the sandbox, in the place of this process.

    Root may make one; others where the kernel lets them be root in a namespace of users.

    Raises:
        SystemExit: If there can be none here.
    """
    missing = [tool for tool in ("unshare", "ip", "mount", "hostname") if which(tool) is None]
    if missing:
        sys.exit(f"two machines need these tools of Linux: {', '.join(missing)}")
    users = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    sandbox = ["unshare", *users, *SANDBOX, "sh", "-c", FIRST, "sh"]
    tried = subprocess.run([*sandbox, "ip", "netns", "add", "host0"], capture_output=True)
    if tried.returncode:
        sys.exit(
            "two machines are made of network namespaces, which this system does not allow "
            f"({tried.stderr.decode().strip()}): run this as root, or in a container with "
            "CAP_SYS_ADMIN and CAP_NET_ADMIN."
        )
    os.environ[INSIDE] = "1"
    os.execvp(sandbox[0], [*sandbox, *command])


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout
