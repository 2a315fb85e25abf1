"""The benchmark runs; what it measures is not for a test to judge.

Here are also the tests of ``fit_begins``.
"""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import time_to_first_step
from benchmarks.fit_begins import PARTS, Clock

PLAIN = {"import": 6.0, "build": 9.0, "setup": 1.0, "first step": 3.0, "second step": 2.0}


def test_parts_within_others_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([1.0, 3.0, 6.0, 10.0])
    monkeypatch.setattr("benchmarks.fit_begins.time.process_time", lambda: next(times))
    clock = Clock()

    clock.begin("setup")
    clock.wrapped("measuring", lambda: None)()
    clock.begin("first step")

    assert clock.seconds == {"import": 1.0, "setup": 2.0 + 4.0, "measuring": 3.0}


def test_longest_part_beside_what_is_allowed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ours: dict[str, Any] = {**PLAIN, "import of lightning_gpipe": 0.5, "measuring": 1.5}
    monkeypatch.setattr(
        time_to_first_step, "seconds", lambda model, way: PLAIN if way == "plain" else ours
    )

    time_to_first_step.main(["--models=char", "--ways=time", "--rounds=1"])

    # A tenth of ten seconds, and a step of two.
    assert '"found": 0.5' in capsys.readouterr().out


def test_fit_is_timed_by_its_parts() -> None:
    plain = time_to_first_step.seconds("char", "plain")
    ours = time_to_first_step.seconds("char", "time")

    assert {*PLAIN} <= {*plain}
    assert {*ours} >= {*PLAIN, "import of lightning_gpipe", *PARTS} - {"planning"}
