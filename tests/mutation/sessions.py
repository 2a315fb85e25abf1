"""Runs of pytest in a copy of the tree, on the host and on simulated GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from tests.mutation import probe
from tests.mutation.trees import Tree

Event = dict[str, Any]

# Imported once per server: what the tests import and the tree does not contain.
PRELOADED = ("pytest", "torch", "lightning.pytorch", "hypothesis")
_SIMULATION = "tests.simcuda.plugin"  # before torch; it is not mutated


class Sessions:
    """A server for runs on the host, and one for runs on simulated GPUs, started when needed.

    Args:
        tree: The copy.
        preloaded: The packages that a server imports.
    """

    def __init__(self, tree: Tree, preloaded: Sequence[str] = PRELOADED) -> None:
        self._tree = tree
        self._preloaded = preloaded
        self._servers: dict[bool, subprocess.Popen[str]] = {}

    def run(
        self,
        paths: Sequence[str],
        *,
        simulated: bool,
        limit: float,
        tests: Sequence[str] | None = None,
        stop: bool = True,
    ) -> Iterator[Event]:
        """Run tests, and yield their events; the iterator must be read to its end.

        Args:
            paths: The files or folders.
            simulated: Whether on simulated GPUs.
            limit: The seconds after which a test has hung.
            tests: The ids of those to run, in order; None for all.
            stop: Whether to stop at the first failure.
        """
        server = self._server(simulated)
        assert server.stdin is not None and server.stdout is not None
        request = {"paths": list(paths), "limit": limit, "stop": stop}
        request["tests"] = None if tests is None else list(tests)
        print(json.dumps(request), file=server.stdin, flush=True)
        for line in server.stdout:
            event = json.loads(line)
            if event["event"] == "over":
                return
            yield event
        raise RuntimeError(f"the server of {self._tree.root} must answer: it ended")

    def close(self) -> None:
        """End the servers."""
        for server in self._servers.values():
            server.communicate()  # closes its input
        self._servers.clear()

    def _server(self, simulated: bool) -> subprocess.Popen[str]:
        if simulated not in self._servers:
            root = str(self._tree.root)
            environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
            environment[probe.FILE] = f"{root}.reached"
            environment.pop("SIMULATED_GPUS", None)
            first: list[str] = []
            if simulated:
                environment["SIMULATED_GPUS"] = "4"
                first = [_SIMULATION]
            self._servers[simulated] = subprocess.Popen(
                [sys.executable, "-m", "tests.mutation.server", *first, *self._preloaded],
                cwd=self._tree.root,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        return self._servers[simulated]
