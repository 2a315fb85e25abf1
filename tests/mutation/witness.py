"""What a run of pytest reports, test by test, to the process that waits for it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import IO, Any

import pytest

from tests.mutation import probe


class Witness:
    """A plugin of pytest that writes a line of JSON for each event.

    Args:
        lines: Where to write.
        tests: The ids of the tests to run, in this order; None for all, in theirs.
    """

    def __init__(self, lines: IO[str], tests: Sequence[str] | None) -> None:
        probe.begin()
        self._lines = lines
        self._order = None if tests is None else {test: k for k, test in enumerate(tests)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self._order is not None:
            order = self._order
            items[:] = sorted(
                (item for item in items if item.nodeid in order),
                key=lambda item: order[item.nodeid],
            )

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._tell("failed", report.nodeid)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        probe.take()
        self._tell("started", nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._tell("failed", report.nodeid)
        elif report.when == "call" and report.passed:
            self._tell("passed", report.nodeid, seconds=round(report.duration, 3))

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._tell("finished", nodeid, reached=probe.take())

    def end(self, status: int) -> None:
        """Tell that pytest has ended; that it could not begin counts as a failure."""
        if status in (pytest.ExitCode.INTERNAL_ERROR, pytest.ExitCode.USAGE_ERROR):
            self._tell("failed", "the import of the tests")
        self._tell("ended", "")

    def _tell(self, event: str, test: str, **details: Any) -> None:
        print(json.dumps({"event": event, "test": test, **details}), file=self._lines, flush=True)
