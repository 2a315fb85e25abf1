"""Figures beside those of the last saved run on such a machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import Outcome, Run, tables
from benchmarks.harness import Report, options
from benchmarks.harness.contest import Ratio
from benchmarks.harness.history import changes, latest_before

MACHINE = {"processor": "x", "cores": "2", "memory": "24 GiB", "load before": "0.1"}


def report(found: float | None, bound: str, quartiles: list[float] | None = None) -> dict[str, Any]:
    target: dict[str, Any] = {"claim": "a / b", "found": found, "target": bound, "met": True}
    if quartiles:
        target["quartiles"] = quartiles
    command = "python -m benchmarks.it"
    return {"benchmark": "it", "command": command, "machine": MACHINE, "targets": [target]}


@pytest.mark.parametrize(
    "now, before, worse",
    [
        (report(1.0, "at most 1.1", [0.98, 1.02]), report(0.9, "at most 1.1", [0.88, 0.92]), True),
        (report(1.0, "at most 1.1", [0.91, 1.02]), report(0.9, "at most 1.1", [0.88, 0.92]), False),
        (report(0.8, "at most 1.1", [0.78, 0.82]), report(0.9, "at most 1.1", [0.88, 0.92]), False),
        (report(1.0, "at least 1", [0.98, 1.02]), report(1.2, "at least 1", [1.1, 1.3]), True),
        (report(1.4, "at least 1", [1.38, 1.42]), report(1.2, "at least 1", [1.1, 1.3]), False),
        (report(1.0, "at most 2"), report(0.98, "at most 2"), False),  # counted
        (report(1.1, "at most 2"), report(1.0, "at most 2"), True),
        (report(1.1, ""), report(1.0, ""), False),  # for information
        (report(0.0, "at most 0"), report(0.0, "at most 0"), False),
        (report(2.0, "at most 0"), report(0.0, "at most 0"), True),
        # Saved before reports had quartiles.
        (report(1.0, "at most 1.1", [0.9, 1.1]), report(0.95, "at most 1.1"), False),
        (report(1.0, "at most 1.1", [0.9, 1.1]), report(0.8, "at most 1.1"), True),
    ],
)
def test_worse_by_more_than_it_varies(
    now: dict[str, Any], before: dict[str, Any], worse: bool
) -> None:
    assert changes(now, before) == {"a / b": (before["targets"][0]["found"], worse)}


def test_figures_that_were_not_measured() -> None:
    assert changes(report(None, "at most 1"), report(1.0, "at most 1")) == {}
    assert changes(report(1.0, "at most 1"), report(None, "at most 1")) == {}


def test_last_run_of_the_same_command_on_such_a_machine(tmp_path: Path) -> None:
    now = report(1.0, "at most 2")
    others = {
        "2026-01-01-it": {
            **report(0.7, "at most 2"),
            "command": "python -m benchmarks.it --rounds 7 --save",
        },
        "2026-01-02-it": {**report(0.8, "at most 2"), "machine": {**MACHINE, "cores": "64"}},
        "2026-01-03-it": {**report(0.9, "at most 2"), "command": "python -m benchmarks.it --m 8"},
        "2026-01-04-it": now,  # which this run has saved
        "2026-01-05-another": report(0.6, "at most 2"),
    }
    for name, each in others.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(each), encoding="utf-8")

    former = latest_before({**now, "machine": {**MACHINE, "load before": "3.0"}}, tmp_path)

    assert former == others["2026-01-01-it"]
    assert latest_before(report(1.0, "at most 2"), tmp_path / "none") is None


def test_ratio_keeps_its_quartiles() -> None:
    made = Report(options("it", "", rounds=1, argv=[]), "title")

    made.target("a / b", Ratio([1.0, 2.0, 3.0, 4.0, 5.0]), at_most=4)
    made.target("c / d", 3.0)

    ratio, number = made.as_json()["targets"]
    assert (ratio["found"], ratio["quartiles"]) == (3.0, [2.0, 4.0])
    assert "quartiles" not in number


def test_table_says_what_got_worse(monkeypatch: pytest.MonkeyPatch) -> None:
    before = report(0.9, "at most 1.1", [0.88, 0.92])
    monkeypatch.setattr("benchmarks.__main__.latest_before", lambda now: before)
    now = report(1.0, "at most 1.1", [0.98, 1.02])

    _, targets = tables([Outcome(Run("it", 1.0), reports=[now])])

    assert list(targets.columns[5].cells) == ["0.900, now WORSE"]
