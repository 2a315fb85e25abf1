"""The table has all of Lightning, and tests that exist."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest
from lightning_utilities.core.imports import RequirementCache

from tests.lightning.features import found
from tests.lightning.features.table import FOLDER, TESTS, page, rows

ROWS = list(rows())

pytestmark = pytest.mark.skipif(
    not RequirementCache("lightning>=2.6"), reason="the table is of Lightning 2.6"
)


@pytest.mark.parametrize("kind", found.features())
def test_every_feature_has_a_row(kind: str) -> None:
    listed = [row.name for row in ROWS if row.kind == kind]

    assert sorted(found.features()[kind] - {*listed}) == []
    assert len(listed) == len({*listed}), "a feature has one row"


@cache
def functions_of(path: Path) -> set[str]:
    """The names of the functions in a file, if there is one."""
    if not path.exists():
        return set()
    tree = ast.parse(path.read_text("utf-8"))
    return {each.name for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)}


def test_every_row_has_a_test_that_exists() -> None:
    wrong = [row.test for row in ROWS if row.function not in functions_of(row.file)]
    assert wrong == []


def test_every_parameter_of_a_row_is_one_of_its_test() -> None:
    texts = "\n".join(path.read_text("utf-8") for path in FOLDER.glob("*.py"))
    names = {name for kind in found.features().values() for name in kind}
    wrong = [
        row.test
        for row in ROWS
        if row.parameter
        and f'"{row.parameter}"' not in texts
        and f"def {row.parameter}(" not in texts
        and row.parameter.rpartition("-")[2] not in names
    ]
    assert wrong == []


def test_every_row_that_differs_or_is_refused_says_how() -> None:
    assert [row.name for row in ROWS if row.verdict != "works" and not row.note] == []


def test_page_is_that_of_the_table() -> None:
    written = (TESTS.parent / "docs" / "guide" / "lightning.md").read_text("utf-8")

    assert written == page(), "run python -m tests.lightning.features"
