"""A run of the training script on both machines, by torchrun."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from tests.multihost.namespaces import Machine, Machines
from tests.support.waiting import awaited

SCRIPT = Path(__file__).with_name("training.py")
PROCESSES = {"per_stage": 2, "per_node": 1}  # on each machine
LONGEST = 240.0  # seconds; far more than a run takes on a busy machine


class Run:
    """A run, which may be started again.

    Args:
        machines: On which.
        folder: Where it writes.
        mode: Which processes there are.
        options: Further options of the script.
    """

    def __init__(self, machines: Machines, folder: Path, mode: str, *options: str) -> None:
        self._machines = machines
        self._folder = folder
        self._command = [str(SCRIPT), str(folder), mode, *options]
        self._ranks = range(2 * PROCESSES[mode])
        self._launchers: list[subprocess.Popen[bytes]] = []
        folder.mkdir(exist_ok=True)

    def start(self, *options: str, on: int = 2) -> None:
        """Start torchrun on the first ``on`` machines, with further options of its own."""
        self._launchers = [self._launch(each, options) for each in self._machines.both[:on]]

    def start_without_launcher(self, address: str) -> None:
        """Start the script on each machine, as one process, with the first one at an address."""
        self._launchers = []
        for k, machine in enumerate(self._machines.both):
            variables = {"MASTER_ADDR": address, "MASTER_PORT": 29500, "NODE_RANK": k, "RANK": k}
            environment = [f"{name}={value}" for name, value in variables.items()]
            command = ["env", "LOCAL_RANK=0", *environment, sys.executable, *self._command]
            log = self._folder / f"{machine.name}.log"
            self._launchers.append(machine.start(command, log))

    def _launch(self, machine: Machine, options: tuple[str, ...]) -> subprocess.Popen[bytes]:
        torchrun = [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", "2", "--nproc-per-node", str(len(self._ranks) // 2)),
            *("--rdzv-backend", "c10d", "--rdzv-id", "run"),
            *("--rdzv-endpoint", f"{self._machines.both[0].name}:29500"),
        ]
        log = self._folder / f"{machine.name}.log"
        return machine.start([*torchrun, *options, *self._command], log)

    def end(self) -> list[int]:
        """Wait until both machines have ended, and have no process left; their exit codes."""
        try:
            codes = [each.wait(LONGEST) for each in self._launchers]
        except subprocess.TimeoutExpired:
            raise AssertionError(f"a run must end:\n{self.printed()}") from None
        assert awaited(lambda: len(self._machines.processes()), 0, LONGEST) == 0
        return codes

    def succeed(self) -> None:
        """Wait for the end, which must be a good one."""
        assert self.end() == [0, 0], self.printed()

    def reach(self, step: int) -> None:
        """Wait until each rank has made a step."""
        reached = awaited(lambda: min(map(self.steps, self._ranks)) >= step, True, LONGEST)
        assert reached, self.printed()

    def fail(self) -> None:
        """Wait until each rank has said what went wrong, and has ended."""
        launchers = {each.pid for each in self._launchers}
        told = awaited(lambda: len(self.errors()), len(self._ranks), LONGEST)
        left = awaited(lambda: len({*self._machines.processes()} - launchers), 0, LONGEST)
        assert (told, left) == (len(self._ranks), 0), self.printed()

    def begin(self) -> None:
        """Wait until each rank is about to start."""
        begun = awaited(
            lambda: len(list(self._folder.glob("process-*"))), len(self._ranks), LONGEST
        )
        assert begun == len(self._ranks), self.printed()

    def process(self, rank: int) -> int:
        """The id of the process that is a rank now."""
        return int((self._folder / f"process-{rank}").read_text(encoding="utf-8"))

    def steps(self, rank: int) -> int:
        """The last step that a rank has made."""
        file = self._folder / f"steps-{rank}"
        steps = file.read_text(encoding="utf-8").split() if file.exists() else []
        return int(steps[-1]) if steps else 0

    def errors(self) -> dict[int, str]:
        """What went wrong, by rank."""
        found = {rank: self._folder / f"error-{rank}" for rank in self._ranks}
        return {k: f.read_text(encoding="utf-8") for k, f in found.items() if f.exists()}

    def printed(self) -> str:
        """The end of what both machines have printed, with the stacks of what still runs."""
        for rank in self._ranks:
            with suppress(FileNotFoundError, ProcessLookupError):
                os.kill(self.process(rank), signal.SIGUSR1)
        time.sleep(1.0)
        logs = sorted(self._folder.glob("*.log"))
        return "\n".join(f"{f.name}:\n{f.read_text(encoding='utf-8')[-12000:]}" for f in logs)

    def weights(self) -> dict[str, Any]:
        """Where it has ended."""
        return ended(self._folder)


def ended(folder: Path) -> dict[str, Any]:
    """The weights and the state of the optimizer at the end of a run in this folder."""
    found = torch.load(folder / "end.ckpt", weights_only=False)
    return {name: found[name] for name in ("global_step", "state_dict", "optimizer_states")}
