"""Where a benchmark ran is told on every system, or is called unknown."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.harness.machine import machine, versions


@pytest.fixture(autouse=True)
def _nothing_remembered() -> Iterator[None]:
    for each in (machine, versions):
        each.cache_clear()
    yield
    for each in (machine, versions):
        each.cache_clear()


def test_cores_are_those_that_the_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 5, 7}, raising=False)

    assert machine()["cores"] == "3"


def test_system_that_knows_no_limit_of_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only Linux has os.sched_getaffinity: once no benchmark could report on macOS."""
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 9)

    assert machine()["cores"] == "9"


def test_folder_that_is_no_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GIT_DIR", str(tmp_path))

    assert versions()["commit"] == "unknown"


def test_machine_without_git(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    assert versions()["commit"] == "unknown"
