"""Processes that this one has started do not outlive it.

One that fails tells the others, which end by themselves. One that is stopped does not end, and gets
no signal but SIGKILL; one that hangs may not either. They would stay on the machine for ever.
"""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.process import BaseProcess
from subprocess import Popen
from typing import Any

from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.utilities import rank_zero_info
from torch.distributed.distributed_c10d import _world
from typing_extensions import override

from lightning_gpipe.core.transport import end_waits

Process = Popen[Any] | BaseProcess

AFTER_FAILURE = timedelta(seconds=30)  # to end by themselves, which torchrun gives them too
_GRACE = timedelta(seconds=5)  # from SIGTERM to SIGKILL
_POLL = 0.05  # seconds


class Scripts(_SubprocessScriptLauncher):
    """Starts the script again for each process, and ends those that outlive this one.

    Args:
        cluster_environment: As for Lightning's launcher.
        num_processes: As there.
        num_nodes: As there.
        timeout: How long the others may go on when this process ends without an error.
    """

    def __init__(
        self,
        cluster_environment: ClusterEnvironment,
        num_processes: int,
        num_nodes: int,
        timeout: timedelta,
    ) -> None:
        super().__init__(cluster_environment, num_processes, num_nodes)
        self._timeout = timeout
        self._failed = False

    @override
    def launch(
        self,
        function: Callable[..., Any],
        *args: Any,
        trainer: Trainer | None = None,
        **kwargs: Any,
    ) -> Any:
        try:
            return super().launch(function, *args, trainer=trainer, **kwargs)
        except BaseException:
            self._failed = True
            self._dismiss_observer()
            raise

    @override
    def _call_children_scripts(self) -> None:
        # Finalizers run at exit, the last one first: the connections, which are made later, say
        # before that this process ends, and why.
        weakref.finalize(Scripts, self._end, os.getpid())
        super()._call_children_scripts()

    def _dismiss_observer(self) -> None:
        """Let this process end by its own error.

        Lightning's observer kills it some seconds after another one has ended with an error.
        """
        observed, self.procs = self.procs, [*self.procs]
        observed.clear()

    def _end(self, process: int) -> None:
        if os.getpid() != process:  # it was forked
            return
        self._dismiss_observer()
        if _left(self.procs, _GRACE):  # they may wait for this process
            for group in list(_world.pg_map):
                end_waits(group)
        failed = self._failed or getattr(sys, "last_value", None) is not None
        end(self.procs, AFTER_FAILURE if failed else self._timeout)


def end(processes: Sequence[Process], patience: timedelta) -> None:
    """End processes, unless they end by themselves.

    Args:
        processes: Those that this process has started.
        patience: How long to wait for those that are not stopped.
    """
    try:
        left = _left(processes, patience)
        for each in left:
            rank_zero_info(
                "processes must end with the one that has started them: process "
                f"{each.pid} is stopped, or has not ended for {patience.total_seconds():g} s. It "
                "is ended now."
            )
            each.terminate()
        _left(left, _GRACE)
    finally:  # Ctrl-C ends the wait
        left = [each for each in processes if _lives(each)]
        for each in left:
            each.kill()
    _left(left, _GRACE)  # so that none is a zombie, if this process goes on


def _left(processes: Sequence[Process], patience: timedelta) -> list[Process]:
    """Wait for processes to end; return those left, at once if all of them are stopped."""
    deadline = time.monotonic() + patience.total_seconds()
    while True:
        left = [each for each in processes if _lives(each)]
        if all(map(_is_stopped, left)) or time.monotonic() > deadline:
            return left
        time.sleep(_POLL)


def _lives(process: Process) -> bool:
    return process.is_alive() if isinstance(process, BaseProcess) else process.poll() is None


def _is_stopped(process: Process) -> bool:
    """Return True if a process is stopped, where the system tells."""
    if sys.platform == "win32" or not hasattr(os, "waitid") or process.pid is None:
        return False
    try:
        return os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # of a forkserver
        return False
