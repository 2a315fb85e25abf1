"""`make test-lightning`: what it counts as a failure, and what it says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.published.__main__ import ROOT, main, selected, verdict
from tests.published.expected import FOLDER

TRAINS = """
import os
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}

def trained():
    trainer = Trainer(accelerator="cpu", max_steps=1, limit_val_batches=0, **QUIET)
    trainer.fit(BoringModel())
    return type(trainer.strategy).__name__

def test_trains(): assert trained() == "InjectedStrategy"
def test_trains_plainly(): assert trained() == "SingleDeviceStrategy"
def test_fails(): assert False
"""


def output(tmp_path: Path, tests: str) -> tuple[int, list[str]]:
    """The exit status of the command for a checkout with these tests, and what it says."""
    folder = tmp_path / FOLDER
    folder.mkdir(parents=True)
    (folder / "test_it.py").write_text(tests, encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "tests.published", str(tmp_path), FOLDER],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=250,
    )
    return done.returncode, done.stdout.splitlines()


def test_run_with_a_pipeline_and_without(tmp_path: Path) -> None:
    status, lines = output(tmp_path, TRAINS)

    assert status == 1
    assert "2 times a pipeline of two stages ran, on 2 mini-batches in all." in "\n".join(lines)
    assert lines[-4:] == [
        "Fails without a pipeline, too:",
        f"  {FOLDER}test_it.py::test_fails",
        "Fails with a pipeline only, or does not fail as the table says:",
        f"  {FOLDER}test_it.py::test_trains_plainly",
    ]


def test_run_without_a_pipeline_proves_nothing(tmp_path: Path) -> None:
    status, lines = output(tmp_path, "def test_of_something_else(): pass")

    assert status != 0
    assert "A pipeline must run in some test: got none." in "\n".join(lines)


@pytest.mark.parametrize(
    "status, failed, plainly, expected",
    [(1, ["a", "b"], ["a"], 1), (1, ["a"], ["a"], 0), (9, ["a"], ["a"], 9), (2, [], [], 2)],
    ids=["one of ours", "none of ours", "no pipeline ran", "interrupted"],
)
def test_exit_status(status: int, failed: list[str], plainly: list[str], expected: int) -> None:
    assert verdict(status, failed, plainly)[0] == expected


@pytest.mark.parametrize(
    "chosen, parts",
    [
        ([], 5),
        (["-k", "restart"], 5),
        (["tests/test_it.py"], 0),
        (["-x", "tests/test_it.py::test_restart[1]"], 0),
    ],
)
def test_selected_tests(tmp_path: Path, chosen: list[str], parts: int) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_it.py").touch()

    arguments = selected(tmp_path, chosen)

    assert sum(each.startswith(FOLDER) for each in arguments) == parts
    assert arguments[len(arguments) - len(chosen) :] == chosen


@pytest.mark.parametrize("named", [False, True])
def test_no_checkout(tmp_path: Path, named: bool, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(str(tmp_path) if named else "") == 2

    said = capsys.readouterr().err
    assert f"LIGHTNING must be a checkout of Lightning, with its {FOLDER}: got " in said
    assert "make test-lightning LIGHTNING=pytorch-lightning" in said
