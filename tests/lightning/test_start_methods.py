"""Fits over processes that Lightning starts: the main process has the trained weights."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.lightning_modules import fitted, weights
from tests.support.models import assert_same
from tests.support.started import Drawing

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
