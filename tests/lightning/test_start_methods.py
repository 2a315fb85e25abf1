"""Fits over processes that Lightning starts: the main process has the trained weights."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_gpipe.distributed import Group, ProcessLauncher
from tests.support.lightning_modules import Classifier, Data, fitted, weights
from tests.support.models import assert_same
from tests.support.ranks import new_ranks
from tests.support.started import Drawing
from tests.support.trainers import trainer_over

ROOT = Path(__file__).parents[2]


def script(method: str, file: Path) -> None:
    """Run the script as a user does."""
    command = [sys.executable, "-m", "tests.support.started", method, str(file)]
    subprocess.run(command, check=True, cwd=ROOT, timeout=200)


def notebook(method: str, file: Path) -> None:
    """Run the script's lines in a cell of a notebook."""
    nbformat = pytest.importorskip("nbformat")
    from tests.support.notebooks import executed

    lines = [
        "from pathlib import Path",
        "from tests.support.started import main",
        f"main({method!r}, Path({str(file)!r}))",
    ]
    new = nbformat.v4
    path = file.with_suffix(".ipynb")
    nbformat.write(new.new_notebook(cells=[new.new_code_cell("\n".join(lines))]), path)
    executed(path, file.parent)


@pytest.mark.launches
@pytest.mark.parametrize(
    "run, method",
    [(script, "popen"), (script, "fork"), (script, "spawn"), (notebook, "fork")],
    ids=lambda each: getattr(each, "__name__", each),
)
def test_weights_are_those_of_one_device(
    run: Callable[[str, Path], None],
    method: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once weights that a forked or spawned process had trained were refused on their way home.

    Lightning brings them in a file that is no checkpoint, so each such fit ended in an error.
    """
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    run(method, tmp_path / "weights")

    found: dict[str, Any] = torch.load(tmp_path / "weights", weights_only=False)["state_dict"]
    assert_same(dict(found), weights(fitted(tmp_path, build=Drawing)))


def bring_home(root: Path) -> bool:
    """Do what a forked process does after a fit; return whether the first one lacks values."""
    model = Classifier()
    made = trainer_over(root, "per_stage", [2, 1, 1, 2], {}, (4, 1), max_steps=1)
    made.fit(model, datamodule=Data())
    strategy: Any = made.strategy
    fetch, part = strategy._checkpoints.fetch, strategy._processes._part
    launcher = ProcessLauncher(strategy, "fork", nullcontext, fetch, part)
    receive = Group._receive

    def receive_slowly(*args: Any) -> None:
        time.sleep(0.05)
        receive(*args)

    with pytest.MonkeyPatch.context() as patch:
        if made.global_rank == 0:
            patch.setattr(Group, "_receive", receive_slowly)
        launcher._collect_rank_zero_results(made, None)
    if made.global_rank > 0:
        os._exit(0)  # as a forked process ends: nothing runs at its exit
    return any(x.is_meta for x in model.state_dict().values())


def test_forked_processes_wait_for_the_first_one(tmp_path: Path) -> None:
    """Once those that had given their weights ended, and others took them for lost."""
    with new_ranks(4) as ranks:
        ranks.start(bring_home, tmp_path)

        assert ranks.result(0) is False
