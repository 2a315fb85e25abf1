"""No hang: a process of a Trainer ends with its own error, and leaves none running."""

import os
import signal
from datetime import timedelta
from functools import partialmethod
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch._C._distributed_c10d import HashStore
from torch.distributed import DistStoreError

from tests.support.endings import endings
from tests.support.lightning_modules import Classifier, Data
from tests.support.stopping import run
from tests.support.trainers import trainer_over

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
    pytest.mark.launches,
]

SECONDS = 0.5  # far longer than it takes from the error to the end of the interpreter


class SlowWait:
    """A wait that takes long to end once it is in vain."""

    def end(self) -> None:
        try:
            HashStore().wait(["never"], timedelta(seconds=SECONDS))
        except DistStoreError:
            return


class Fault(Callback):
    """Sends itself a signal in the second step, on one rank."""

    def __init__(self, rank: int, number: int) -> None:
        self._rank, self._number = rank, number
        self._wait = SlowWait()

    def on_fit_start(self, trainer: L.Trainer, *_: Any) -> None:
        for watcher in trainer.strategy._processes.pipeline_group.watchers:  # type: ignore[attr-defined]
            watcher.on_lost_wait(self._wait.end)

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if (trainer.global_rank, trainer.global_step) == (self._rank, 1):
            os.kill(os.getpid(), self._number)


def fit(root: str, rank: str, number: str) -> None:
    made = trainer_over(
        Path(root),
        "per_stage",
        [2, 2, 2],
        {"lost_after": timedelta(seconds=2)},
        machines=(3, 1),
        callbacks=[Fault(int(rank), int(number))],
    )
    made.fit(Classifier(), datamodule=Data())


def test_process_ends_with_the_error_of_a_lost_one(tmp_path: Path) -> None:
    """Once the thread that ends other waits came back from Gloo when the interpreter had ended.

    That ended the process by SIGABRT, in half of the runs: "terminate called without an active
    exception", with an exit status of -6 in place of 1.
    """
    lost = [(1, signal.SIGKILL), (0, signal.SIGSTOP)]
    folders = [tmp_path / str(rank) for rank, _ in lost]
    cases = [
        (str(folder), str(rank), str(int(number)))
        for folder, (rank, number) in zip(folders, lost, strict=True)
    ]

    found = endings(tmp_path, 3, fit, cases)

    for (rank, number), group in zip(lost, found, strict=True):
        assert group.pop(rank).status == -number
        for each in group:
            assert f"RankFailed: rank {rank} (stage {rank}) is lost: " in each.said
            assert "terminate called" not in each.said
            assert each.status == 1


def fit_with_a_status(root: str, status: str) -> None:
    """A fit with a SIGTERM, for which Lightning after 2.6 exits with a status of its own."""
    with pytest.MonkeyPatch.context() as patch:
        end = partialmethod(SystemExit.__init__, int(status))
        patch.setattr(SIGTERMException, "__init__", end)
        fit(root, "1", str(int(signal.SIGTERM)))


@pytest.mark.parametrize("status", [0, 143])
def test_all_processes_end_with_the_status_of_sigterm(tmp_path: Path, status: int) -> None:
    [group] = endings(tmp_path, 3, fit_with_a_status, [(str(tmp_path), str(status))])

    assert [each.status for each in group] == [status] * 3


# How the main process starts the other one, where that stops, the status and the error.
STOPS = [
    ("popen", "step", 1, "RankFailed: rank 1 (stage 1) is lost: "),
    ("popen", "save", 0, "RankFailed: rank 0 has ended, while the last process to save a"),
    ("fork", "step", 1, "KeyboardInterrupt"),
]


def test_process_ends_with_the_one_that_has_started_it(tmp_path: Path) -> None:
    """Once a stopped process stayed on the machine for ever, since it gets no SIGTERM.

    A main process that had forked it waited for it at its end, also for ever.
    """
    files = [tmp_path / f"{method} {place}" / "number" for method, place, _, _ in STOPS]
    for file in files:
        file.parent.mkdir()
    cases = [
        (method, str(file), place) for file, (method, place, _, _) in zip(files, STOPS, strict=True)
    ]

    found = endings(tmp_path, 1, run, cases)

    for file, (*_, status, error), [ending] in zip(files, STOPS, found, strict=True):
        assert ending.status == status
        assert error in ending.said
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.read_text(encoding="utf-8")), 0)
