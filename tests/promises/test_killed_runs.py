"""No hang: a run with a killed process ends and resumes; a drawn kill, 30 in a soak.

The process and the moment are drawn: a call, anywhere in the run or in the middle of saving. The
others end by themselves and say who was lost; started again from the last checkpoint, which may be
of the middle of an epoch, the run ends with the weights of one that nothing disturbed.
"""

import random
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import settings
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.support.kills import Calls, Moment
from tests.support.processes import assert_equal
from tests.support.ranks import Failed, new_ranks
from tests.support.resumable import Drawing, ResumableData, seed_all
from tests.support.trainers import trainer_over

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")

RANKS = 4
SOAK = settings().max_examples > 1000
KILLS = 20 if SOAK else 1
IN_A_ROW = 10
BOUND = timedelta(seconds=5)


def fit(
    root: Path, victim: int | None = None, last: Moment | None = None, every: int = 1
) -> dict[str, int]:
    """Train from the last checkpoint on, until the end or, on one rank, a moment.

    Args:
        root: Where checkpoints are.
        victim: The rank.
        last: The moment.
        every: After how many steps each checkpoint is saved, of the four of an epoch.

    Returns:
        How many calls were made.
    """
    calls = Calls(last if torch.distributed.get_rank() == victim else None)
    seed_all(0)
    model = Drawing()
    made = trainer_over(
        root,
        "per_stage",
        [1, 2, 2, 1],
        {"lost_after": BOUND},
        machines=(RANKS, 1),
        enable_checkpointing=True,
        callbacks=[ModelCheckpoint(root, save_last=True, every_n_train_steps=every)],
    )
    made.save_checkpoint = calls.saving(made.save_checkpoint)  # type: ignore[method-assign]
    path = root / "last.ckpt"

    resumed = path if path.exists() else None
    calls.during(lambda: made.fit(model, datamodule=ResumableData(size=5), ckpt_path=resumed))
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


def killed(root: Path, victim: int, moment: Moment, every: int = 1) -> bool:
    """Train from the last checkpoint on; whether that came as far as the moment."""
    with new_ranks(RANKS) as ranks:
        found = ranks.outcomes(fit, root, victim, moment, every)
    outcome = found.pop(victim)
    if not isinstance(outcome, Failed):
        return False
    assert str(outcome) == f"rank {victim} died"
    for each in found:
        assert isinstance(each, Failed)
        assert f"RankFailed: rank {victim} " in str(each), str(each)
    return True


@pytest.mark.launches
@pytest.mark.parametrize("seed", range(KILLS))
def test_killed_run_ends_and_goes_on(tmp_path: Path, undisturbed: Undisturbed, seed: int) -> None:
    draw = random.Random(seed)
    victim, where = draw.randrange(RANKS), ("saving", "anywhere")[seed % 2]
    moment = Moment(where, 1 + draw.randrange(undisturbed.calls[victim][where]))

    assert killed(tmp_path, victim, moment)
    with new_ranks(RANKS) as ranks:
        ranks.run(fit, tmp_path)

    assert_equal(ended(tmp_path), undisturbed.end)


@pytest.mark.skipif(not SOAK, reason="takes a minute: make soak")
@pytest.mark.parametrize("seed", range(IN_A_ROW, IN_A_ROW + 2))
def test_run_that_is_killed_again_and_again(
    tmp_path: Path, undisturbed: Undisturbed, seed: int
) -> None:
    # Not at the last step of an epoch: Lightning 2.6 counts an epoch less then, if a run that goes
    # on from there is killed and goes on again, and trains more steps.
    draw, kills, every = random.Random(seed), 0, 3
    while kills < IN_A_ROW:
        victim, where = draw.randrange(RANKS), draw.choice(("saving", "anywhere"))
        calls = undisturbed.calls[victim][where] // 3
        kills += killed(tmp_path, victim, Moment(where, 1 + draw.randrange(calls)), every)
    with new_ranks(RANKS) as ranks:
        ranks.run(fit, tmp_path, None, None, every)

    assert_equal(ended(tmp_path), undisturbed.end)
