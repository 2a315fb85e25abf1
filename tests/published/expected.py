"""The table of Lightning's tests that end otherwise with a pipeline, and why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

TABLE = Path(__file__).with_name("expected.txt")
FOLDER = "tests/tests_pytorch/"  # in a checkout of Lightning; the table leaves it out


def rows(text: str) -> Iterator[tuple[str, str]]:
    """Each test of a table, and the reason above it.

    A line with ``=`` is the reason of the tests below it. A test without brackets stands for all
    its parameters.

    Raises:
        ValueError: If a test has no reason, or is there twice.
    """
    seen: set[str] = set()
    reason = ""
    for line in filter(None, map(str.strip, text.splitlines())):
        if line.startswith("="):
            reason = line.removeprefix("=").strip()
        elif not line.startswith("#"):
            if not reason or line in seen:
                fault = "is there twice" if reason else "has none"
                raise ValueError(
                    f"each test of the table must have one reason, in a line '= ...' above it: "
                    f"{line} {fault}. Write it once, below its reason."
                )
            seen.add(line)
            yield FOLDER + line, reason


def reason_of(reasons: Mapping[str, str], test: str) -> str | None:
    """Why a test ends otherwise; None if it must end as without a pipeline."""
    return reasons.get(test, reasons.get(test.partition("[")[0]))


def missing(reasons: Mapping[str, str], tests: Iterable[str]) -> list[str]:
    """The rows of the table that name none of the tests, of the files that these are in."""
    found = {name for test in tests for name in (test, test.partition("[")[0])}
    files = {test.partition("::")[0] for test in found}
    return [row for row in reasons if row.partition("::")[0] in files and row not in found]
