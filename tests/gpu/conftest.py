"""The fixture of the tests in this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lightning_gpipe import GPipe
from tests.gpu.models import pipeline_of


@pytest.fixture
def gpipe() -> Iterator[Callable[..., GPipe]]:
    """:func:`pipeline_of`, whose pipelines are closed at the end of the test."""
    made: list[GPipe] = []

    def build(*args: Any, **options: Any) -> GPipe:
        made.append(pipeline_of(*args, **options))
        return made[-1]

    yield build
    for pipeline in made:
        pipeline.close()
