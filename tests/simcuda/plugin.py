"""Runs tests on simulated GPUs, and fails a test in which a hazard happened.

tests/conftest.py names it first if ``SIMULATED_GPUS`` is set, as torch must not be imported yet.
"""

from __future__ import annotations

import pytest

from tests.simcuda.build import UnavailableError
from tests.simcuda.hazards import NAME, FailOnHazard
from tests.simcuda.simulation import start


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
    config.pluginmanager.register(_STARTED, NAME)


def take_hazards() -> list[str]:
    """The hazards so far in this process, which then do not count any more."""
    return _STARTED.take() if isinstance(_STARTED, FailOnHazard) else []
