"""Processes that a launcher has started end with it: by themselves, or by a signal."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.strategies.launchers import subprocess_script

from lightning_gpipe.distributed import children
from tests.support.faults import OwnError, throw
from tests.support.waiting import NEVER, awaited

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs signals")

knows_stops = pytest.mark.skipif(not hasattr(os, "waitid"), reason="no system call tells")

LONG = timedelta(seconds=NEVER)
NONE = timedelta(0)

SLEEPS = "import time; print(flush=True); time.sleep(3600)"
REFUSES = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEPS}"


@contextmanager
def child(code: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that runs this code, of which something was heard."""
    process = subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE)
    with process:
        try:
            assert process.stdout is not None, "it has a pipe"
            process.stdout.readline()
            yield process
        finally:
            process.kill()


def test_process_that_ends_by_itself_gets_no_signal() -> None:
    with child("import time; print(flush=True); time.sleep(0.2)") as process:
        children.end([process], LONG)

        assert process.returncode == 0


def test_process_that_goes_on_may_end_in_order() -> None:
    with child(SLEEPS) as process:
        children.end([process], NONE)

        assert process.returncode == -signal.SIGTERM


def test_process_that_does_not_heed_it_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "_GRACE", timedelta(seconds=0.2))
    with child(REFUSES) as process:
        children.end([process], NONE)
        process.wait()

        assert process.returncode == -signal.SIGKILL


@knows_stops
def test_stopped_process_is_not_waited_for() -> None:
    with child(SLEEPS) as process:
        process.send_signal(signal.SIGSTOP)
        assert awaited(lambda: children._is_stopped(process), True)

        children.end([process], LONG)
        process.wait()

        assert process.returncode == -signal.SIGKILL


@knows_stops
def test_stopped_process_is_told_from_one_that_goes_on_again() -> None:
    with child(SLEEPS) as process:
        os.kill(process.pid, signal.SIGSTOP)
        assert awaited(lambda: children._is_stopped(process), True)

        os.kill(process.pid, signal.SIGCONT)

        assert not awaited(lambda: children._is_stopped(process), False)


def test_process_with_an_error_is_not_killed_by_lightnings_observer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once it was, up to five seconds after the process that had failed, before its own error."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # else a launcher sets it
    observed: list[list[subprocess.Popen[bytes]]] = []
    monkeypatch.setattr(subprocess_script, "_launch_process_observer", observed.append)
    errors: list[BaseException] = []
    launcher = children.Scripts(LightningEnvironment(), 1, 1, NONE, errors.append)
    with child(SLEEPS) as process:
        launcher.procs = [process]
        monkeypatch.setattr(launcher, "_call_children_scripts", lambda: None)

        with pytest.raises(OwnError) as raised:
            launcher.launch(throw(OwnError("of this process")))

        assert errors == [raised.value]
        assert observed == [[]]
        assert launcher.procs == [process]
