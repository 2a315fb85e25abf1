"""Processes of one process group, which run functions of the tests.

They are forked from a server that has imported what they need, so a test may kill some of them: the
next one gets others.
"""

import faulthandler
import gc
import multiprocessing
import os
import pickle
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

TIMEOUT = 60.0  # of a group; a busy machine may compile for half of it
ENOUGH = 180.0  # seconds for a function; far more than it needs on a busy machine

_CONTEXT = multiprocessing.get_context("forkserver")
# Simulated GPUs come before torch, which the others import.
_SIMULATED = ["tests.simcuda.plugin"] if "SIMULATED_GPUS" in os.environ else []
_CONTEXT.set_forkserver_preload(
    [
        *_SIMULATED,
        "torch",
        "torch.distributed",
        "torch.distributed.pipelining",  # for the benchmarks' processes, which it forks as well
        "lightning_gpipe",
        __name__,
    ]
)


_GROUPS: dict[tuple[int, str], dist.ProcessGroup] = {}  # on a rank, by sizes and backends
NCCL = "cpu:gloo,cuda:nccl"  # the backend where there are several GPUs, which may be simulated


def group_of(size: int, backend: str = "gloo") -> dist.ProcessGroup:
    """On a rank: the process group of the first ``size`` ranks, over Gloo or :data:`NCCL`."""
    return _GROUPS[size, backend]


class Failed(AssertionError):
    """What a rank raised, with its traceback."""


class Ranks:
    """Processes of one process group over Gloo.

    Args:
        size: How many there are.
        shared: Whether tests share them, so that a function must leave none of its threads.
    """

    def __init__(self, size: int, *, shared: bool = False) -> None:
        self.size = size
        self.broken = False
        self._folder = tempfile.TemporaryDirectory()
        store = Path(self._folder.name) / "store"
        self.processes: list[ForkServerProcess] = []
        self._ends: list[Connection] = []
        for rank in range(size):
            own, other = _CONTEXT.Pipe()
            arguments = (rank, size, str(store), list(sys.path), other, shared)
            process = _CONTEXT.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            other.close()
            self.processes.append(process)
            self._ends.append(own)

    def run(self, function: Callable[..., Any], *args: Any, among: int | None = None) -> list[Any]:
        """Call ``function(*args)`` on each rank, and return what each of them returned.

        Args:
            function: The function.
            args: Its arguments.
            among: On how many of the ranks, from the first; None for all.

        Raises:
            Failed: If one raised.
        """
        results = self.outcomes(function, *args, among=among)
        errors = [f"rank {rank}: {each}" for rank, each in enumerate(results) if _failed(each)]
        if errors:
            raise Failed("\n".join(errors))
        return results

    def outcomes(
        self, function: Callable[..., Any], *args: Any, among: int | None = None
    ) -> list[Any]:
        """Like :meth:`run`, with a :class:`Failed` in the place of what a rank raised."""
        self.start(function, *args, among=among)
        results = [self.result(rank) for rank in range(among or self.size)]
        self.broken = any(map(_failed, results))  # their groups may be as well
        return results

    def start(self, function: Callable[..., Any], *args: Any, among: int | None = None) -> None:
        """Call ``function(*args)`` on each rank, without waiting for it."""
        for end in self._ends[:among]:
            end.send_bytes(pickle.dumps((function, args)))

    def result(self, rank: int) -> Any:
        """What a rank returned, or a :class:`Failed`."""
        end = self._ends[rank]
        self.broken = True
        assert end.poll(ENOUGH), f"rank {rank} must end within {ENOUGH} s"
        try:
            return pickle.loads(end.recv_bytes())
        except EOFError:
            return Failed(f"rank {rank} died")

    def close(self) -> None:
        """End all of them."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        for end in self._ends:
            end.close()
        self._folder.cleanup()


class Pool:
    """Ranks that tests share, until one of them fails."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._ranks: Ranks | None = None

    @property
    def ranks(self) -> Ranks:
        """Ranks that have not failed."""
        if self._ranks is None or self._ranks.broken:
            self.close()
            self._ranks = Ranks(self._size, shared=True)
        return self._ranks

    def run(self, function: Callable[..., Any], *args: Any, among: int | None = None) -> list[Any]:
        """As :meth:`Ranks.run`."""
        return self.ranks.run(function, *args, among=among)

    def close(self) -> None:
        """End them."""
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Pool]:
    """Two processes of one process group."""
    pool = Pool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Pool]:
    """Four processes of one process group."""
    pool = Pool(4)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def eight_ranks() -> Iterator[Pool]:
    """Eight processes of one process group."""
    pool = Pool(8)
    yield pool
    pool.close()


@contextmanager
def new_ranks(size: int) -> Iterator[Ranks]:
    """New processes, for a test that kills some or lets them fail."""
    found = Ranks(size)
    try:
        yield found
    finally:
        found.close()


@pytest.fixture
def three_ranks() -> Iterator[Ranks]:
    """Three new processes, for a test that kills some or lets them fail."""
    with new_ranks(3) as found:
        yield found


def _failed(result: Any) -> bool:
    return isinstance(result, Failed)


def join_group(rank: int, size: int, store: str) -> None:
    """Make this process a rank of a process group, and of those that :func:`group_of` has.

    Args:
        rank: Its number.
        size: How many there are.
        store: The path of a file by which they find one another.
    """
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
    backends = ["gloo"]
    if torch.cuda.device_count() >= 2:
        if _SIMULATED:
            from tests.simcuda.collectives import provide_collectives
            from tests.simcuda.nccl import provide_nccl

            provide_nccl()
            provide_collectives()
        backends += [NCCL] if dist.is_nccl_available() else []
    dist.init_process_group(
        backends[-1],
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=TIMEOUT),
    )
    for backend in backends:
        for k in range(1, size + 1):
            _GROUPS[k, backend] = dist.new_group(range(k), backend=backend)


def pipeline_threads() -> list[str]:
    """The names of the threads that pipelines have in this process."""
    return [each.name for each in threading.enumerate() if each.name.startswith("gpipe")]


def _serve(
    rank: int, size: int, store: str, path: list[str], end: Connection, shared: bool
) -> None:
    sys.path[:] = path
    gc.freeze()  # what all ranks share is no garbage, and is copied where a search looks at it
    torch.set_num_threads(1)
    join_group(rank, size, store)
    while True:
        try:
            function, args = pickle.loads(end.recv_bytes())
        except EOFError:
            return
        faulthandler.dump_traceback_later(0.8 * TIMEOUT)
        try:
            result = function(*args)
        except BaseException as error:
            result = Failed("".join(traceback.format_exception(error)))
        faulthandler.cancel_dump_traceback_later()
        answer = pickle.dumps(result)
        failed = _failed(result)
        del function, args, result
        gc.collect()  # a Trainer's process groups have threads that wake 100 times a second
        names = [] if failed or not shared else pipeline_threads()
        if names:
            message = f"a pipeline that nobody has must leave no threads: got {', '.join(names)}"
            answer = pickle.dumps(Failed(message))
        end.send_bytes(answer)
