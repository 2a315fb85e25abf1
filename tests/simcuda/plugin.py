"""Runs tests on simulated GPUs, and fails a test in which a hazard happened.

tests/conftest.py names it first if ``SIMULATED_GPUS`` is set, as torch must not be imported yet.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Generator

import pytest

from tests.simcuda.build import UnavailableError
from tests.simcuda.simulation import Simulation, start

_MOST = 12  # hazards in one message


class FailOnHazard:
    """Fails a test with its hazards; those of one that takes ``simulation`` are its own matter."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    @pytest.fixture
    def simulation(self) -> Simulation:
        return self._simulation

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        return (yield from self._watched(item, "call"))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, object, object]:
        return (yield from self._watched(item, "teardown"))

    def _watched(self, item: pytest.Item, when: str) -> Generator[None, object, object]:
        try:
            result = yield
        except BaseException:
            # The test has failed anyway; a hazard may be why.
            if found := self._simulation.take_hazards():
                item.add_report_section(when, "hazards", _listed(found))
            raise
        if when == "teardown" and isinstance(item, pytest.Function):
            item.funcargs.clear()  # values of fixtures; pytest does it when all is reported
        gc.collect()  # what is freed now is freed by this test
        found = self._simulation.take_hazards()
        if found and not (isinstance(item, pytest.Function) and "simulation" in item.fixturenames):
            pytest.fail(_listed(found), pytrace=False)
        return result


def _listed(hazards: list[str]) -> str:
    counts = Counter(hazards).most_common(_MOST)
    title = f"hazards on the simulated GPUs: {len(hazards)}"
    return "\n".join([title, *(f"{count}x {text}" for text, count in counts)])


class Nothing:
    """Ends the run before it starts, as there are no simulated GPUs here."""

    def __init__(self, why: str) -> None:
        self._why = why

    def pytest_sessionstart(self) -> None:
        pytest.exit(f"skipped, because there are no simulated GPUs here: {self._why}", 0)


def _started() -> FailOnHazard | Nothing:
    try:
        return FailOnHazard(start())
    except UnavailableError as error:
        return Nothing(str(error))


_STARTED = _started()  # while this module is imported: before those after it import torch


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_STARTED)
