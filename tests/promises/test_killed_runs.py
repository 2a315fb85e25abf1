"""Promise: a run of which a process was killed ends, and goes on: 2 drawn kills; 20 in a soak.

The process and the moment are drawn: the call of a function, anywhere in the run or in the middle
of saving. The others end by themselves and say who was lost; started again from the last
checkpoint, the run ends with the weights of one that nothing disturbed.
"""

import os
import random
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
from hypothesis import settings
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn

from tests.support.lightning_modules import Classifier, Data, six_layers
from tests.support.processes import assert_equal
from tests.support.ranks import Failed, new_ranks
from tests.support.trainers import trainer_over

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")

RANKS = 4
KILLS = 20 if settings().max_examples > 1000 else 2
BOUND = timedelta(seconds=5)


class Moment(NamedTuple):
    """A call of a function on the main thread: which one of those made there."""

    where: str
    call: int


class Calls:
    """Counts the calls of functions on this thread, and ends the process at one of them.

    Args:
        last: The call that is the last one; None to count only.

    Attributes:
        made: How many were made in all, and while a checkpoint was saved.
    """

    def __init__(self, last: Moment | None) -> None:
        self.made = {"anywhere": 0, "saving": 0}
        self._last = last
        self._saving = False

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            self._count("anywhere")
            if self._saving:
                self._count("saving")

    def _count(self, where: str) -> None:
        self.made[where] += 1
        if self._last == (where, self.made[where]):
            os.kill(os.getpid(), signal.SIGKILL)

    def saving(self, save: Callable[..., None]) -> Callable[..., None]:
        """A function that saves, which is told."""

        def told(*args: Any, **kwargs: Any) -> None:
            self._saving = True
            save(*args, **kwargs)
            self._saving = False

        return told

    def during(self, run: Callable[[], None]) -> None:
        """Run with this at work."""
        sys.setprofile(self)
        try:
            run()
        finally:
            sys.setprofile(None)


class Seeds(Callback):
    """Seeds each step by its number."""

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        torch.manual_seed(trainer.global_step)


def fit(root: Path, victim: int | None = None, last: Moment | None = None) -> dict[str, int]:
    """Train from the last checkpoint on, until the end or, on one rank, a moment.

    Returns:
        How many calls were made.
    """
    calls = Calls(last if torch.distributed.get_rank() == victim else None)
    torch.manual_seed(0)
    layers = six_layers()
    layers[1] = nn.Sequential(nn.Tanh(), nn.Dropout(0.2))
    made = trainer_over(
        root,
        "per_stage",
        [1, 2, 2, 1],
        {"lost_after": BOUND},
        machines=(RANKS, 1),
        enable_checkpointing=True,
        callbacks=[Seeds(), ModelCheckpoint(root, save_last=True)],
    )
    made.save_checkpoint = calls.saving(made.save_checkpoint)  # type: ignore[method-assign]
    model = Classifier("adam", layers=layers)
    path = root / "last.ckpt"

    resumed = path if path.exists() else None
    calls.during(lambda: made.fit(model, datamodule=Data(), ckpt_path=resumed))
    made.save_checkpoint(root / "end.ckpt")
    return calls.made


def ended(root: Path) -> Any:
    """Where a run ended."""
    found = torch.load(root / "end.ckpt", weights_only=False)
    return {name: found[name] for name in ("global_step", "state_dict", "optimizer_states")}


class Undisturbed(NamedTuple):
    """What a run comes to that nothing disturbs: its end, and the calls of each rank."""

    end: Any
    calls: list[dict[str, int]]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    root = tmp_path_factory.mktemp("undisturbed")
    with new_ranks(RANKS) as ranks:
        calls = ranks.run(fit, root)
    return Undisturbed(ended(root), calls)


@pytest.mark.parametrize("seed", range(KILLS))
def test_killed_run_ends_and_goes_on(tmp_path: Path, undisturbed: Undisturbed, seed: int) -> None:
    draw = random.Random(seed)
    victim, where = draw.randrange(RANKS), ("saving", "anywhere")[seed % 2]
    moment = Moment(where, 1 + draw.randrange(undisturbed.calls[victim][where]))

    with new_ranks(RANKS) as ranks:
        found = ranks.outcomes(fit, tmp_path, victim, moment)
    with new_ranks(RANKS) as ranks:
        ranks.run(fit, tmp_path)

    assert str(found.pop(victim)) == f"rank {victim} died"
    for each in found:
        assert isinstance(each, Failed)
        assert f"RankFailed: rank {victim} " in str(each)
    assert_equal(ended(tmp_path), undisturbed.end)
