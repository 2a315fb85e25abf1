"""A sample of the cases of each test, for a suite that is run often: ``SAMPLED_CASES=6 pytest``.

Of a test with many cases one in six is run, the same ones each time, but two at least, or one of a
test over processes, which takes seconds. ``make test`` runs these, and ``make test-all`` all cases,
as pytest does.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable
from hashlib import sha256
from math import ceil

import pytest

_LEAST = 2  # cases of a test that are run


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Function]) -> None:
    """Deselect the cases that are not in the sample."""
    parts = int(os.environ.get("SAMPLED_CASES", "1"))
    over_processes = {item for item in items if any("ranks" in x for x in item.fixturenames)}
    chosen = sample((item.nodeid for item in items if item not in over_processes), parts)
    chosen |= sample((item.nodeid for item in over_processes), parts, least=1)
    if left_out := [item for item in items if item.nodeid not in chosen]:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.nodeid in chosen]


def sample(names: Iterable[str], parts: int, least: int = _LEAST) -> set[str]:
    """Return the names of cases in the sample: one in ``parts`` of each test."""
    cases = defaultdict[str, list[str]](list)
    for name in names:
        cases[name.partition("[")[0]].append(name)
    return {
        name
        for each in cases.values()
        for name in sorted(each, key=_draw)[: max(least, ceil(len(each) / parts))]
    }


def _draw(name: str) -> bytes:
    return sha256(name.encode()).digest()
