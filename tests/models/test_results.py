"""Results of cases are kept, and the page is written from all of them."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from tests.models.case import Case
from tests.models.page import page
from tests.models.results import Result, Results
from tests.models.settings import SOME
from tests.models.trial import Failure, Trial


def a_case(name: str, module: str | tuple[str, ...] = "") -> Case:
    return Case(name, nn.Identity, lambda _: {}, module)


def of(trial: Trial) -> Result:
    return Result.of(trial, ["torch"])


def test_results_are_kept_for_a_later_run(tmp_path: Path) -> None:
    results = Results("zoo", tmp_path)
    results.keep(of(Trial(a_case("lion", "blocks"), 6, [])))
    results.keep(of(Trial(a_case("bear"), 2, [])))

    later = Results("zoo", tmp_path)

    assert "lion" in later
    assert "wolf" not in later
    assert [each.name for each in later.in_order(["bear", "wolf", "lion"])] == ["bear", "lion"]
    assert later.in_order(["lion"])[0].paths == ["blocks"]


def test_result_has_no_folder_of_the_machine() -> None:
    failure = Failure(SOME[0], "Error\nat /home/me/site-packages/zoo/lion.py:3")

    assert of(Trial(a_case("lion"), 1, [failure])).said == "at zoo/lion.py:3"


def test_later_result_replaces_an_earlier_one_and_no_other(tmp_path: Path) -> None:
    results = Results("zoo", tmp_path)
    results.keep(of(Trial(a_case("lion"), 1, [Failure(SOME[0], "lost")])))
    results.keep(of(Trial(a_case("bear"), 2, [])))
    results.keep(of(Trial(a_case("lion"), 6, [])))

    kept = Results("zoo", tmp_path).in_order(["lion", "bear"])

    assert [(each.name, each.settings, each.same) for each in kept] == [
        ("lion", 6, True),
        ("bear", 2, True),
    ]


def test_page_of_what_was_the_same_refused_and_failed() -> None:
    versions = {"torch": "2.9", "zoo": "1.0"}
    found = [
        Result("lion", [], 6, 0, "", versions),
        Result("bear", ["encoder", "decoder"], 1, 0, "no | way, at a.py", versions),
        Result("wolf", ["blocks"], 6, 2, "ValueError: x", {**versions, "zoo": "2.0"}),
    ]

    text = page({"zoo": found, "none": []})

    assert "## zoo: 1 of 3" in text
    assert "| lion | the model | 6 | same | torch 2.9, zoo 1.0 |" in text
    assert "| bear | `encoder`, `decoder` | 1 | refused: no \\| way, at a.py | torch" in text
    assert (
        "| wolf | `blocks` | 6 | **fails** in 2 of 6 settings: ValueError: x | torch 2.9, zoo 2"
        in (text)
    )
    assert "none" not in text
