"""A test in which a hazard happened fails; where there are no simulated GPUs, it is said why."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

ROOT = Path(__file__).parents[2]
SIMULATED = pytest.mark.skipif(
    "SIMULATED_GPUS" not in os.environ, reason="needs SIMULATED_GPUS=4, as `make test` sets it"
)


def outcome(folder: Path, tests: str, **variables: str) -> str:
    """What pytest says of these tests on simulated GPUs."""
    file = folder / "test_it.py"
    file.write_text(dedent(tests), encoding="utf-8")
    (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    options = ["-p", "tests.simcuda.plugin", "-p", "no:cacheprovider", "-rA", "--tb=short"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(file)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "SIMULATED_GPUS": "2", **variables},
        capture_output=True,
        text=True,
        timeout=250,
    )
    return done.stdout


@SIMULATED
def test_test_with_a_hazard(tmp_path: Path) -> None:
    text = outcome(
        tmp_path,
        """
        import torch

        def race():
            side = torch.cuda.Stream("cuda:1")
            x = torch.ones(10, device="cuda:1")
            with torch.cuda.stream(side):
                x.add_(1)
            side.synchronize()

        def test_before(): pass
        def test_race(): race()
        def test_race_and_error(): race(); raise ValueError("its own")
        def test_its_own_matter(simulation): race()
        def test_after(): pass
        """,
    )

    # pytest cuts the lines of its summary, but not where a variable tells it that this is a CI.
    reports, _, summary = text.partition("short test summary info")
    assert reports.count("1x race: aten::add writes on cuda:1/stream") == 2
    assert "FAILED test_it.py::test_race - Failed: hazards on the simulated GPUs: 1" in summary
    assert "FAILED test_it.py::test_race_and_error - ValueError: its own" in summary
    assert "2 failed, 3 passed" in summary


def test_no_simulated_gpus_here(tmp_path: Path) -> None:
    text = outcome(tmp_path, "def test(): pass", SIMULATED_GPUS="many")

    assert "skipped, because there are no simulated GPUs here: SIMULATED_GPUS must be" in text
    assert "passed" not in text
