"""Processes that end as those of a script do, with the interpreter: ranks of other tests do not.

A script imports what is needed once, forks the ranks, and says how each of them has ended. The ends
take long, so that what goes on for too long does so in all runs.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.support.ranks import join_group
from tests.support.waiting import PATIENCE

_LONG = 1.0  # seconds


class Ending(NamedTuple):
    """How a process has ended.

    Attributes:
        status: Its exit status; minus the signal that has ended or stopped it.
        said: What it has written.
    """

    status: int
    said: str


def endings(folder: Path, size: int, function: Callable[..., None], *args: str) -> list[Ending]:
    """How processes of one group end that run ``function(*args)`` and nothing after it.

    One that is stopped is killed when all others have ended.

    Args:
        folder: An empty one.
        size: How many there are.
        function: A function of a module.
        args: Its arguments.
    """
    name = function.__module__, function.__name__
    with script(folder / "said", __name__, str(folder), str(size), *name, *args) as (status, said):
        assert status == 0, said
    return [Ending(*each) for each in json.loads(said.splitlines()[-1])]


@contextmanager
def script(output: Path, module: str, *args: str) -> Iterator[Ending]:
    """How a script of the tests ends; what it has left is killed after the ``with`` block.

    Args:
        output: The file for all that its processes write.
        module: The script.
        args: Its arguments.
    """
    with output.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *args],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        status = process.wait(4 * PATIENCE)
        yield Ending(status, output.read_text(encoding="utf-8"))
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class _LongEnd:
    """Takes its time when the interpreter ends."""

    def __del__(self, sleep: Callable[[float], None] = time.sleep) -> None:
        sleep(_LONG)


def _fork(size: int, folder: Path) -> int | None:
    """In each rank its number; in the first process None, when all have ended."""
    children: list[int] = []
    for rank in range(size):
        child = os.fork()
        if not child:
            file = os.open(folder / str(rank), os.O_WRONLY | os.O_CREAT)
            os.dup2(file, 1)
            os.dup2(file, 2)
            join_group(rank, size, str(folder / "store"))
            return rank
        children.append(child)
    statuses = [os.waitpid(child, os.WUNTRACED)[1] for child in children]
    for child, status in zip(children, statuses, strict=True):
        if os.WIFSTOPPED(status):
            os.kill(child, signal.SIGKILL)
    found = [
        (_status(status), (folder / str(rank)).read_text(encoding="utf-8"))
        for rank, status in enumerate(statuses)
    ]
    print(json.dumps(found))
    return None


def _status(status: int) -> int:
    if os.WIFSTOPPED(status):
        return -os.WSTOPSIG(status)
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    torch.set_num_threads(1)  # OpenMP does not survive a fork
    _folder, _size, _module, _name, *_args = sys.argv[1:]
    _function: Any = getattr(importlib.import_module(_module), _name)
    _rank = _fork(int(_size), Path(_folder))
    if _rank is not None:
        _last = _LongEnd()
        _function(*_args)
