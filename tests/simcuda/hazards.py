"""Fails a test in which a hazard happened."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Generator

import pytest

from tests.simcuda.simulation import Simulation

NAME = "simulated GPUs"  # by which pytest knows the plugin
_MOST = 12  # hazards in one message


class FailOnHazard:
    """Fails a test with its hazards; those of one that takes ``simulation`` are its own matter."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def take(self) -> list[str]:
        """The hazards so far, which then do not count any more."""
        return self._simulation.take_hazards()

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
            if found := self.take():
                item.add_report_section(when, "hazards", _listed(found))
            raise
        if when == "teardown" and isinstance(item, pytest.Function):
            item.funcargs.clear()  # values of fixtures; pytest does it when all is reported
        gc.collect()  # what is freed now is freed by this test
        found = self.take()
        if found and not (isinstance(item, pytest.Function) and "simulation" in item.fixturenames):
            pytest.fail(_listed(found), pytrace=False)
        return result


def _listed(hazards: list[str]) -> str:
    counts = Counter(hazards).most_common(_MOST)
    title = f"hazards on the simulated GPUs: {len(hazards)}"
    return "\n".join([title, *(f"{count}x {text}" for text, count in counts)])
