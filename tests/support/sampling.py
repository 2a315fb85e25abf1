"""A sample of the cases of each test, for a suite that is run often: ``SAMPLED_CASES=4 pytest``.

Of a test with many cases one in four is run, the same ones each time, but three at least. ``make
test`` runs these, and ``make test-all`` all cases, as pytest does.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable
from hashlib import sha256
from math import ceil

import pytest

_LEAST = 3  # cases of a test that are run


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the cases that are not in the sample."""
    chosen = sample((item.nodeid for item in items), int(os.environ.get("SAMPLED_CASES", "1")))
    if left_out := [item for item in items if item.nodeid not in chosen]:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.nodeid in chosen]


def sample(names: Iterable[str], parts: int) -> set[str]:
    """Return the names of cases in the sample: one in ``parts`` of each test."""
    cases = defaultdict[str, list[str]](list)
    for name in names:
        cases[name.partition("[")[0]].append(name)
    return {
        name
        for each in cases.values()
        for name in sorted(each, key=_draw)[: max(_LEAST, ceil(len(each) / parts))]
    }


def _draw(name: str) -> bytes:
    return sha256(name.encode()).digest()
