"""A process that has imported what takes long, and forks for each run of pytest.

Importing torch and Lightning takes seconds, many tests take milliseconds. The process imports
nothing of the copied tree but this, so each fork imports the changed modules itself.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import sys
from collections.abc import Iterator
from typing import Any

# Assertions need not explain themselves; limits are kept by the server, as a wait in C ignores
# those of a plugin.
_OPTIONS = ["-q", "--assert=plain", "-p", "no:cacheprovider", "-p", "no:randomly"]
_NO_LIMITS = ["-o", "timeout=0", "-o", "faulthandler_timeout=0"]


def serve() -> None:
    """Answer requests, one per line of the standard input, until it ends."""
    for line in sys.stdin:
        request = json.loads(line)
        for event in _events(request):
            print(json.dumps(event), flush=True)
        print(json.dumps({"event": "over"}), flush=True)


def _events(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of one run, with ``hung`` in the place of what did not come in time."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _run(request, writing)
    os.close(writing)
    running, rest, ended = "the import of the tests", b"", False
    while True:
        if not select.select([reading], [], [], request["limit"])[0]:
            yield {"event": "hung", "test": running}
            break
        part = os.read(reading, 1 << 16)
        if not part:
            if not ended:  # the process has died
                yield {"event": "failed", "test": running}
            break
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            event = json.loads(line)
            running = event["test"] or running
            ended |= event["event"] == "ended"
            yield event
    os.close(reading)
    os.killpg(child, signal.SIGKILL)  # it, and what its tests have left
    os.waitpid(child, 0)


def _run(request: dict[str, Any], writing: int) -> None:
    """Run pytest in the forked process, which does not return."""
    os.setsid()
    silence = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(silence, stream)
    import pytest

    from tests.mutation.witness import Witness

    with open(writing, "w", encoding="utf-8") as lines:
        witness = Witness(lines, request["tests"])
        stop = ["-x"] if request["stop"] else []
        status = pytest.main([*_OPTIONS, *_NO_LIMITS, *stop, *request["paths"]], plugins=[witness])
        witness.end(status)
        os._exit(0)  # threads that a mutant has left waiting would be waited for


if __name__ == "__main__":
    for name in sys.argv[1:]:
        importlib.import_module(name)
    gc.freeze()  # tests that collect garbage search for it here too
    serve()
