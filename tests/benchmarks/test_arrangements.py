"""Every arrangement of every example is run and compared; whether they agree is not for a test."""

import math

import pytest

from benchmarks import arrangements
from benchmarks.arrangements import ARRANGEMENTS, CONFIGS, FOUR_STAGES, Arrangement


def test_every_run_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = []

    def trained(example: str, arrangement: Arrangement, steps: int) -> list[float]:
        ran.append((example, arrangement.name))
        return [4.0, 2.0 if arrangement.name != "per_stage" else 2.1]

    monkeypatch.setattr(arrangements, "trained", trained)

    arrangements.main(["--steps=2"])

    report = capsys.readouterr().out
    assert ran == [(example, each.name) for example in FOUR_STAGES for each in ARRANGEMENTS]
    assert "char_lm, per_stage / threads" in report
    assert report.count("NOT met") == len(FOUR_STAGES)


def test_difference() -> None:
    assert arrangements.difference([4.0, 2.2], [4.0, 2.0]) == pytest.approx(0.1)
    assert arrangements.difference([4.0], [4.0, 2.0]) == math.inf


def test_each_example_has_a_configuration() -> None:
    assert all((CONFIGS / f"{example}.yaml").exists() for example in FOUR_STAGES)
    names = {each.name for each in ARRANGEMENTS}
    assert {each.like for each in ARRANGEMENTS} <= {"", *names}
