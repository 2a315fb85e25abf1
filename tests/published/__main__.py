"""Runs Lightning's own tests with a pipeline: ``python -m tests.published CHECKOUT [FILES...]``.

A test may fail for reasons of its own: it needs a network, or another version of a package. So
what fails with a pipeline runs again without one, in a process of its own, and counts only if it
passes there.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Collection, Sequence
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.published.expected import FOLDER

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("models", "checkpointing", "loops", "core", "trainer")
LEFT_OUT = {"checkpointing/test_legacy_checkpoints.py": "reads checkpoints that are not in git"}
OPTIONS = ["--continue-on-collection-errors", "--timeout=300", "--tb=short", "-q"]


def main(checkout: str, *chosen: str) -> int:
    """Run tests of a checkout.

    Args:
        checkout: Its folder.
        chosen: Arguments of pytest; without a file or a folder among them, all ``PARTS`` run.

    Returns:
        The exit status: 0 if nothing is other than without a pipeline, but for the table.
    """
    folder = Path(checkout).resolve()
    if not checkout or not (folder / FOLDER).is_dir():
        print(
            f"LIGHTNING must be a checkout of Lightning, with its {FOLDER}: got {checkout!r}. Run "
            f"`git clone --branch {version('lightning')} "
            "https://github.com/Lightning-AI/pytorch-lightning`, or with the nearest version, and "
            "then make test-lightning LIGHTNING=pytorch-lightning.",
            file=sys.stderr,
        )
        return 2
    status, failed = run(folder, selected(folder, chosen))
    if not failed:
        return status
    print(f"\n{len(failed)} tests failed: do they without a pipeline?", flush=True)
    _, plainly = run(folder, ["--plain", *failed])
    status, text = verdict(status, failed, plainly)
    print(text)
    return status


def verdict(status: int, failed: Sequence[str], plainly: Collection[str]) -> tuple[int, str]:
    """The exit status of both runs, and which tests failed in which.

    Args:
        status: That of the run with a pipeline.
        failed: The tests that failed in it.
        plainly: Those of them that fail without a pipeline, too.
    """
    ours = [test for test in failed if test not in plainly]
    text = ""
    if plainly:
        text += f"\nFails without a pipeline, too:{listed(plainly)}"
    if ours:
        text += f"\nFails with a pipeline only, or does not fail as the table says:{listed(ours)}"
    return status if ours or status != pytest.ExitCode.TESTS_FAILED else 0, text


def selected(folder: Path, chosen: Sequence[str]) -> list[str]:
    """The arguments of pytest that select tests, see :func:`main`."""
    named = any((folder / each.partition("::")[0]).exists() for each in chosen)
    parts = [] if named else [FOLDER + part for part in PARTS]
    return [*parts, *(f"--ignore={FOLDER}{file}" for file in LEFT_OUT), *chosen]


def run(folder: Path, arguments: Sequence[str]) -> tuple[int, list[str]]:
    """Run pytest in a checkout, which stays as it is.

    Returns:
        Its exit status, and the tests that failed.
    """
    path = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONDONTWRITEBYTECODE": "1",
        "CUDA_VISIBLE_DEVICES": "",  # a Trainer that names no accelerator is on the CPU
    }
    with tempfile.TemporaryDirectory() as own:
        file = Path(own) / "failed"
        plugins = ["-p", "no:cacheprovider", "-p", "tests.published.plugin"]
        command = [sys.executable, "-m", "pytest", *plugins, *OPTIONS, f"--failed-to={file}"]
        status = subprocess.run([*command, *arguments], cwd=folder, env=env).returncode
        return status, file.read_text("utf-8").split("\n")[:-1] if file.exists() else []


def listed(tests: Collection[str]) -> str:
    """Tests, one a line."""
    return "".join(f"\n  {test}" for test in tests)


if __name__ == "__main__":
    sys.exit(main(*(sys.argv[1:] or [""])))
