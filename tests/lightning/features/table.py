"""The table of all features of Lightning: what a pipeline does with each, and the test of that."""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from tests.lightning.features import found

FOLDER = Path(__file__).parent
TESTS = FOLDER.parents[1]

_ROW = re.compile(r"(\S.*?) +(works|differs|refused) +(\S+)(?: +(.+))?")
_SHORT = {"run": "test_runs.py::test_run[{}]", "call": "test_module.py::test_call[{}]"} | {
    "override": "test_module.py::test_override[{}]",
    "hook": "test_hooks.py::test_hook[{kind}-{}]",
}


class Verdict(StrEnum):
    """What a pipeline does with a feature."""

    works = "works"
    differs = "works with a difference"
    refused = "refused"


class Row(NamedTuple):
    """A feature, what a pipeline does with it, the test that says so, and what to know."""

    kind: str
    name: str
    verdict: Verdict
    test: str
    note: str

    @property
    def file(self) -> Path:
        """The file of the test."""
        return TESTS / self.test.partition("::")[0]

    @property
    def function(self) -> str:
        """The function of the test."""
        return self.test.partition("::")[2].partition("[")[0]

    @property
    def parameter(self) -> str:
        """The parameter with which it is called; empty for all."""
        return self.test.partition("[")[2].removesuffix("]")


def rows() -> Iterator[Row]:
    """All rows, as the files ``*.txt`` beside this module have them.

    A heading with ``=`` is a kind. A row has a name, a word of the verdict, a test and a note, with
    two spaces or more between them. ``run``, ``call``, ``override`` and ``hook`` are the test of
    that name in this folder.
    """
    kind = ""
    for line in (FOLDER / "table.txt").read_text("utf-8").splitlines():
        if line.startswith("= "):
            kind = line.removeprefix("= ")
        elif line and not line.startswith("#"):
            yield _row(kind, line)


def _row(kind: str, line: str) -> Row:
    fields = _ROW.fullmatch(line)
    if fields is None:
        raise ValueError(f"a row of table.txt is `name  verdict  test  note`: got {line!r}.")
    name, verdict, test, note = fields.groups()
    short = _SHORT.get(test)
    if short is not None:
        test = "lightning/features/" + short.format(name, kind=kind)
    return Row(kind, name, Verdict[verdict], test, note or "")


def page() -> str:
    """The page of the guide with the table."""
    every = list(rows())
    kinds = list(dict.fromkeys(row.kind for row in every))
    counts = {each: sum(row.verdict is each for row in every) for each in Verdict}
    text = [_HEAD.format(sum(counts.values()), *counts.values())]
    for kind in kinds:
        text += [f"## {kind}\n", "| | | what to know | test |", "|---|---|---|---|"]
        text += [_line(row) for row in every if row.kind == kind]
        text.append("")
    return "\n".join(text)


def _line(row: Row) -> str:
    test = f"{row.test.replace('lightning/', '', 1)}".replace(f"{found.__name__}/", "")
    return f"| `{row.name}` | {row.verdict} | {row.note} | `{test}` |"


_HEAD = """\
# All of Lightning

<!-- made by `python -m tests.lightning.features`; edit tests/lightning/features/table.txt -->

The features of Lightning 2.6, and whether they work with a pipeline. *Works* means that the test of
the row compares a run with the plain run on one device: the calls of all hooks with their
arguments, the metrics, the results, the final weights and the checkpoint are the same. *Works with
a difference* describes the difference. *Refused* means an error that says what to write instead. A
test fails if a version of Lightning has a feature without a row. Of {} rows, {} work, {} work with
a difference and {} are refused.

The table is for one process, `processes="single"`. [Several processes and
machines](processes.md#what-is-refused) lists what is not supported with several. The names of
the tests are in `tests/lightning/features/table.txt`.

Lightning's own published tests also run with a pipeline. The tests with a different result are
listed in `tests/published/expected.txt`, with the reason and with what to write instead.
"""
