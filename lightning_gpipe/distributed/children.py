"""Starts processes, and ends those that this one has started, so that none outlives it.

One that is stopped or hangs does not hear of a failure, and may heed no signal but SIGKILL.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from multiprocessing.process import BaseProcess
from subprocess import Popen
from typing import Any, Literal

from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers import (
    _MultiProcessingLauncher,
    _SubprocessScriptLauncher,
)
from lightning.pytorch.utilities import rank_zero_info
from torch.distributed.distributed_c10d import _world
from typing_extensions import override

from lightning_gpipe.core.transport import abort_group

Process = Popen[Any] | BaseProcess

AFTER_FAILURE = timedelta(seconds=30)  # to end by themselves, which torchrun gives them too
_GRACE = timedelta(seconds=5)  # from SIGTERM to SIGKILL
_POLL = 0.05  # seconds


class Scripts(_SubprocessScriptLauncher):
    """Starts the script again for each process, and ends those that outlive this one.

    Args:
        timeout: How long the others may go on when this process ends without an error.
        on_error: Called with an error before callbacks are, which may wait for the others.
        listening: Returns a context in which the processes start.
    """

    def __init__(
        self,
        cluster_environment: ClusterEnvironment,
        num_processes: int,
        num_nodes: int,
        timeout: timedelta,
        on_error: Callable[[BaseException], None],
        listening: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        super().__init__(cluster_environment, num_processes, num_nodes)
        self._timeout = timeout
        self._on_error = on_error
        self._listening = listening
        self._failed = False

    @override
    def launch(self, *args: Any, **kwargs: Any) -> Any:
        try:
            with self._listening():
                return super().launch(*args, **kwargs)
        except BaseException as error:
            self._failed = True
            self._dismiss_observer()
            self._on_error(error)
            raise

    @override
    def _call_children_scripts(self) -> None:
        # Finalizers run at exit, the last one first: so the connections, which are made later, tell
        # the others before this that the process ends, and why.
        weakref.finalize(Scripts, self._end, os.getpid())
        super()._call_children_scripts()

    def _dismiss_observer(self) -> None:
        """Let this process end by its own error: Lightning's observer would kill it before."""
        observed, self.procs = self.procs, [*self.procs]
        observed.clear()

    def _end(self, process: int) -> None:
        if os.getpid() != process:  # it was forked
            return
        self._dismiss_observer()
        if _wait_for(self.procs, _GRACE):  # the rest may wait for this process
            for group in list(_world.pg_map):
                abort_group(group)
        failed = self._failed or getattr(sys, "last_value", None) is not None
        end(self.procs, AFTER_FAILURE if failed else self._timeout)


class ProcessLauncher(_MultiProcessingLauncher):
    """Starts processes with multiprocessing; the main one gets the whole model by ``fetch``.

    At their end they ``part``, since no finalizer runs at the exit of a forked one.
    """

    def __init__(
        self,
        strategy: ParallelStrategy,
        method: Literal["spawn", "fork"],
        listening: Callable[[], AbstractContextManager[None]],
        fetch: Callable[[LightningModule], None],
        part: Callable[[], None],
    ) -> None:
        super().__init__(strategy, method)
        self._listening = listening
        self._fetch = fetch
        self._part = part

    @override
    def launch(self, *args: Any, **kwargs: Any) -> Any:
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            raise RuntimeError(
                "start_method='spawn' imports the script in each process, so the script must start "
                "processes only where it is the main program: it did so while it was imported. Put "
                "the code that trains behind if __name__ == '__main__':"
            )
        try:
            with self._listening():
                return super().launch(*args, **kwargs)
        except BaseException:
            end(self.procs, AFTER_FAILURE)  # the main process would wait for them when it ends
            raise

    @override
    def _collect_rank_zero_results(self, trainer: Any, results: Any) -> Any:
        self._fetch(trainer.lightning_module)
        collected = super()._collect_rank_zero_results(trainer, results)
        self._part()
        return collected


def end(processes: Sequence[Process], patience: timedelta) -> None:
    """End processes that this one has started; unless stopped, they have ``patience`` to end."""
    try:
        rest = _wait_for(processes, patience)
        for process in rest:
            rank_zero_info(
                "processes must end with the one that has started them: process "
                f"{process.pid} is stopped, or has not ended for {patience.total_seconds():g} s. "
                "It is ended now."
            )
            process.terminate()
        _wait_for(rest, _GRACE)
    finally:  # Ctrl-C ends the wait
        rest = list(filter(_is_alive, processes))
        for process in rest:
            process.kill()
    _wait_for(rest, _GRACE)  # so that none is a zombie, if this process goes on


def _wait_for(processes: Sequence[Process], patience: timedelta) -> list[Process]:
    """Wait for processes to end; return the rest, at once if all of them are stopped."""
    deadline = time.monotonic() + patience.total_seconds()
    while True:
        rest = list(filter(_is_alive, processes))
        if all(map(_is_stopped, rest)) or time.monotonic() > deadline:
            return rest
        time.sleep(_POLL)


def _is_alive(process: Process) -> bool:
    return process.is_alive() if isinstance(process, BaseProcess) else process.poll() is None


def _is_stopped(process: Process) -> bool:
    if sys.platform == "win32" or not hasattr(os, "waitid") or process.pid is None:
        return False
    try:
        return os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # it was waited for elsewhere
        return False
