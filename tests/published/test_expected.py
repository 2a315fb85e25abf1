"""The table of Lightning's tests that end otherwise with a pipeline."""

from __future__ import annotations

from textwrap import dedent

import pytest

from tests.published.expected import FOLDER, TABLE, missing, reason_of, rows

TABLE_OF_TWO_REASONS = dedent("""\
    # A comment.

    = It asks for one device.

    loops/test_a.py::test_one
    loops/test_a.py::test_two[1-cpu]

    = It is refused.

    core/test_b.py::test_three
    """)
REASONS = dict(rows(TABLE_OF_TWO_REASONS))
ONE, TWO, THREE = (
    f"{FOLDER}loops/test_a.py::test_one",
    f"{FOLDER}loops/test_a.py::test_two[1-cpu]",
    f"{FOLDER}core/test_b.py::test_three",
)


def test_each_test_has_the_reason_above_it() -> None:
    assert REASONS == {
        ONE: "It asks for one device.",
        TWO: "It asks for one device.",
        THREE: "It is refused.",
    }


@pytest.mark.parametrize(
    "test, expected",
    [
        (ONE, "It asks for one device."),
        (f"{ONE}[2]", "It asks for one device."),
        (TWO, "It asks for one device."),
        (TWO.replace("cpu", "gpu"), None),
        (f"{FOLDER}loops/test_a.py::test_one_more", None),
    ],
)
def test_reason_of_a_test(test: str, expected: str | None) -> None:
    assert reason_of(REASONS, test) == expected


@pytest.mark.parametrize(
    "tests, expected",
    [
        ([f"{ONE}[2]", TWO, THREE], []),
        ([ONE, TWO], []),
        ([ONE, f"{FOLDER}core/test_b.py::test_four"], [TWO, THREE]),
        ([f"{FOLDER}loops/test_c.py::test_five"], []),
    ],
    ids=["all there", "a file that does not run", "rows out of date", "other files"],
)
def test_rows_that_name_no_test(tests: list[str], expected: list[str]) -> None:
    assert missing(REASONS, tests) == expected


@pytest.mark.parametrize(
    "text, fault",
    [
        ("core/test_b.py::test_three", "core/test_b.py::test_three has none"),
        ("= It is refused.\na.py::test\n= It hangs.\na.py::test", "a.py::test is there twice"),
    ],
)
def test_table_with_a_fault(text: str, fault: str) -> None:
    with pytest.raises(ValueError, match=f"each test of the table must have one reason.*{fault}"):
        list(rows(text))


def test_the_table_itself() -> None:
    reasons = dict(rows(TABLE.read_text("utf-8")))

    assert reasons
    assert all(".py::test_" in test for test in reasons)
    assert all(reason.endswith(".") for reason in reasons.values())
