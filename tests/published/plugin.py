"""Runs Lightning's own tests with a pipeline: a plugin of pytest, ``-p tests.published.plugin``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector

from tests.published.expected import TABLE, missing, reason_of, rows
from tests.published.injection import Runs, injected

NO_PROOF = 9  # the exit status if no pipeline ran, or the table is out of date


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of this plugin."""
    group = parser.getgroup("lightning-gpipe")
    group.addoption("--plain", action="store_true", help="run them without a pipeline")
    group.addoption("--failed-to", type=Path, help="the file that the failed tests are written to")


def pytest_configure(config: pytest.Config) -> None:
    """Inject the strategy, unless the run is plain."""
    config.addinivalue_line("markers", "flaky(reruns): of pytest-rerunfailures; run once here")
    config.pluginmanager.register(Failures(config.getoption("failed_to")))
    if not config.getoption("plain"):
        config.pluginmanager.register(PipelinedModule())


class Failures:
    """Writes which tests failed, or could not be collected, to a file."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._failed: dict[str, None] = {}

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep the file of tests that could not be collected."""
        if report.failed:
            self._failed[report.nodeid] = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep a test that failed, in its setup or its teardown too."""
        if report.failed:
            self._failed[report.nodeid] = None

    def pytest_sessionfinish(self) -> None:
        """Write the file."""
        if self._file is not None:
            self._file.write_text("".join(f"{test}\n" for test in self._failed), "utf-8")


class PipelinedModule:
    """Injects the strategy; expects the differences of the table, and that a pipeline runs."""

    def __init__(self) -> None:
        self._runs = Runs()
        self._reasons = dict(rows(TABLE.read_text("utf-8")))
        self._missing: list[str] = []
        self._patch = pytest.MonkeyPatch()

    def pytest_sessionstart(self) -> None:
        """Let Trainers without a strategy have a pipeline."""
        chosen = injected(_AcceleratorConnector._choose_strategy, self._runs)
        self._patch.setattr(_AcceleratorConnector, "_choose_strategy", chosen)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> Iterator[None]:
        """Expect the tests of the table to fail: one that passes is a failure."""
        if not any("::" in each for each in config.args):
            self._missing = missing(self._reasons, [item.nodeid for item in items])
        for item in items:
            if (reason := reason_of(self._reasons, item.nodeid)) is not None:
                item.add_marker(pytest.mark.xfail(strict=True, reason=reason))
        return (yield)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Let a run fail that is no proof of anything."""
        self._patch.undo()
        if self._missing or not self._runs.piped:
            session.exitstatus = NO_PROOF

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say how often a pipeline ran, and which rows of the table are out of date."""
        write = terminalreporter.write_line
        write("")
        write(f"{self._runs}.")
        if not self._runs.piped:
            write("A pipeline must run in some test: got none. Choose tests that call trainer.fit.")
        for row in self._missing:
            write(f"{TABLE.name} must name tests that are there: got {row}. Remove it.")
