"""The versions of `make test-oldest` are the oldest that pyproject.toml admits."""

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
LINES = (ROOT / "constraints-oldest.txt").read_text("utf-8").splitlines()
PINS = {name: version for name, _, version in (line.partition("==") for line in LINES) if version}
EXTRAS = ("cli", "pretrained", "pictures", "schedules")
LISTED = [
    *PROJECT["dependencies"],
    *(each for extra in EXTRAS for each in PROJECT["optional-dependencies"][extra]),
]


@pytest.mark.parametrize("listed", LISTED)
def test_oldest_version_is_pinned(listed: str) -> None:
    requirement = Requirement(listed)
    floor = min(each.version for each in requirement.specifier if each.operator == ">=")
    oldest = Version(floor).release

    assert Version(PINS[requirement.name]).release[: len(oldest)] == oldest
