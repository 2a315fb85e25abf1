"""No hang: a forked process has the locks of its parent but not the threads.

Each test runs in a process of its own, since a fork copies the threads of the test suite as well.
"""

import multiprocessing
import os
import traceback
from multiprocessing.connection import Connection
from textwrap import dedent

import pytest

from tests.support.waiting import PATIENCE

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

SETUP = """
import copy
import multiprocessing
import os
import threading
import warnings

import torch
from torch import nn

from lightning_gpipe import GPipe
from tests.support.models import Call, assert_same_step, perceptron, rows

warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: a fork with threads
torch.set_num_threads(1)  # OpenMP does not survive a fork
inside, leave = threading.Event(), threading.Event()
blocks = False


def wait(x):
    if blocks:
        inside.set()
        leave.wait()
    return x


plain = nn.Sequential(*perceptron(2), Call(wait), *perceptron(2))
pipeline = GPipe(copy.deepcopy(plain), [3, 2], devices=["cpu"] * 2, chunks=2, threads=THREADS)


def step():
    pipeline.zero_grad()
    plain.zero_grad()
    assert_same_step(pipeline, plain, rows(7))


def in_child(run):
    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join(TIMEOUT)
    assert not process.is_alive() or process.kill(), "it hangs"
    assert process.exitcode == 0


def run_in_another_thread():
    global blocks
    blocks = True
    thread = threading.Thread(target=lambda: pipeline(rows(7)), daemon=True)
    thread.start()
    assert inside.wait(TIMEOUT)
    blocks = False
    return thread
"""


def run(script: str, *, threads: bool) -> None:
    """Run a script in a process of its own, after the set-up above."""
    context = multiprocessing.get_context("forkserver")  # which has one thread, and imported torch
    own, other = context.Pipe()
    values = f"THREADS, TIMEOUT = {threads}, {PATIENCE}\n"
    process = context.Process(target=_run, args=(values + SETUP + dedent(script), other))
    process.start()
    other.close()
    try:
        assert own.poll(4 * PATIENCE), "it hangs"  # of several waits
        assert own.recv() == "done"
    finally:
        process.kill()
        process.join()
        own.close()


def _run(script: str, parent: Connection) -> None:
    try:
        exec(script, {"__name__": "script"})
    except Exception:
        parent.send(traceback.format_exc())
    else:
        parent.send("done")


every_way = pytest.mark.parametrize("threads", [True, False], ids=["threads", "no threads"])


@every_way
def test_child_uses_the_pipeline_while_another_thread_of_its_parent_does(threads: bool) -> None:
    """Once it waited for a lock that none of its threads held, and had shadow parameters."""
    run(
        """
        own = list(pipeline.parameters())

        def check():
            assert all(p is q for p, q in zip(pipeline.parameters(), own, strict=True))

        step()
        in_child(step)
        thread = run_in_another_thread()
        in_child(check)
        in_child(step)
        leave.set()
        thread.join()
        check()
        step()
        """,
        threads=threads,
    )


def test_child_ends_without_using_it() -> None:
    run(
        """
        import gc
        import sys

        step()
        thread = run_in_another_thread()
        for end in (pipeline.close, lambda: globals().pop("pipeline") and gc.collect(), sys.exit):
            child = os.fork()
            if child == 0:
                end()
                sys.exit(0)
            assert os.waitpid(child, 0) == (child, 0)
        leave.set()
        thread.join()
        step()
        """,
        threads=True,
    )


def test_workers_of_a_data_loader() -> None:
    run(
        """
        from torch.utils.data import DataLoader, Dataset

        class Outputs(Dataset):
            def __len__(self):
                return 4

            def __getitem__(self, k):
                with torch.no_grad():
                    return pipeline(rows(7, seed=k))

        step()
        thread = run_in_another_thread()
        loader = DataLoader(Outputs(), num_workers=2, multiprocessing_context="fork",
                            timeout=TIMEOUT)
        for k, (output,) in enumerate(loader):
            torch.testing.assert_close(output, plain(rows(7, seed=k)).detach())
        leave.set()
        thread.join()
        """,
        threads=True,
    )
