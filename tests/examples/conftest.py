"""What an example changes for its whole process is put back after each test."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _level_of_lightnings_log() -> Iterator[None]:
    log = logging.getLogger("lightning.pytorch")
    before = log.level
    yield
    log.setLevel(before)
