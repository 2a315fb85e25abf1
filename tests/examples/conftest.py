"""What an example changes for its whole process is put back after each test."""

import pytest


@pytest.fixture(autouse=True)
def _all_as_before(level_of_lightnings_log: None, lightning_cli: None) -> None:
    """Holds for every test of an example."""
