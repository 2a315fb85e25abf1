"""The notebook to start from runs as it is shown, and goes on after a cell was interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

PATH = Path(__file__).parents[2] / "examples" / "quickstart.ipynb"


@pytest.fixture
def cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The cells of code after a run."""
    from tests.support.notebooks import executed

    monkeypatch.setenv("PYTHONPATH", str(PATH.parents[1]))
    return [cell for cell in executed(PATH, tmp_path).cells if cell.cell_type == "code"]


def test_notebook(cells: Any) -> None:
    shown = nbformat_of(PATH)
    printed = [texts(cell) for cell in cells]

    assert [cell.source for cell in cells] == [cell.source for cell in shown]
    errors = [output.ename for cell in cells for output in cell.outputs if "ename" in output]
    assert errors == ["SystemExit"], "of the cell that is interrupted, as Lightning ends it"
    assert "training: stop me" in printed[-2]
    assert printed[-1] == texts(shown[-1]) == "steps after the interrupt: 16\n"
    in_pipeline, plain = (word for word in printed[-3].replace(",", "").split() if "." in word)
    assert in_pipeline == plain
    data = [output.get("data", {}) for cell in cells for output in cell.outputs]
    pictures = [each for each in data if "image/png" in each]
    assert len(pictures) == 1


def nbformat_of(path: Path) -> Any:
    """The cells of code as they are in the repository."""
    import nbformat

    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def texts(cell: Any) -> str:
    """What a cell printed."""
    return "".join(each["text"] for each in cell.outputs if each.get("name") == "stdout")
