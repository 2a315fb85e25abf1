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
from collections.abc import Callable, Iterator, Sequence
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


def endings(
    folder: Path, size: int, function: Callable[..., None], cases: Sequence[Sequence[str]]
) -> list[list[Ending]]:
    """How processes end that run ``function(*args)`` and nothing after it: a group for each case.

    The groups run at the same time. A process that is stopped is killed when all others of its
    group have ended.

    Args:
        folder: An empty one.
        size: How many processes a group has; one alone is in no process group.
        function: A function of a module.
        cases: Its arguments in each group.
    """
    name = function.__module__, function.__name__
    args = __name__, str(folder), str(size), *name, json.dumps(cases)
    with script(folder / "said", *args) as (status, said):
        assert status == 0, said
    return [[Ending(*each) for each in group] for group in json.loads(said.splitlines()[-1])]


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


def _fork(size: int, folder: Path, cases: int) -> int | None:
    """In each rank the number of its case; in the first process None, when all have ended."""
    groups: list[dict[Path, int]] = []
    for case in range(cases):
        groups.append({})
        for rank in range(size):
            output = folder / f"{case}-{rank}"
            child = os.fork()
            if not child:
                file = os.open(output, os.O_WRONLY | os.O_CREAT)
                os.dup2(file, 1)
                os.dup2(file, 2)
                if size > 1:
                    join_group(rank, size, str(folder / f"store-{case}"))
                return case
            groups[-1][output] = child
    print(json.dumps([_ends(group) for group in groups]))
    return None


def _ends(children: dict[Path, int]) -> list[tuple[int, str]]:
    """How the processes of a group have ended, and what each has written."""
    statuses = [os.waitpid(child, os.WUNTRACED)[1] for child in children.values()]
    for child, status in zip(children.values(), statuses, strict=True):
        if os.WIFSTOPPED(status):
            os.kill(child, signal.SIGKILL)
    said = [output.read_text(encoding="utf-8") for output in children]
    return list(zip(map(_status, statuses), said, strict=True))


def _status(status: int) -> int:
    if os.WIFSTOPPED(status):
        return -os.WSTOPSIG(status)
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    torch.set_num_threads(1)  # OpenMP does not survive a fork
    _folder, _size, _module, _name, _cases = sys.argv[1:]
    _function: Any = getattr(importlib.import_module(_module), _name)
    _case = _fork(int(_size), Path(_folder), len(json.loads(_cases)))
    if _case is not None:
        _last = _LongEnd()
        _function(*json.loads(_cases)[_case])
