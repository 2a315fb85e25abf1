"""Tries mutants: which test notices that an effect is missing."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import inf

from tests.mutation.mutants import Mutant, without
from tests.mutation.reach import Reach, Test
from tests.mutation.sessions import Sessions
from tests.mutation.trees import Tree

# Tests in one run of pytest: the first runs are short, as most mutants are noticed there.
_SHARES = (5.0, 30.0)  # seconds of tests
_FACTOR = 5.0  # how much longer than usual a test may take, after PATIENCE
PATIENCE = 10.0  # seconds


@dataclass(frozen=True)
class Trial:
    """How a mutant fared.

    Attributes:
        mutant: Which.
        noticed: The id of the test that noticed it; None if none did.
        hung: Whether that test did not end.
        reached_by: The number of tests that reach the effect.
        tried: The number of tests that ran at most.
        seconds: How long it took.
    """

    mutant: Mutant
    noticed: str | None
    hung: bool
    reached_by: int
    tried: int
    seconds: float


def attempt(
    tree: Tree,
    sessions: Sessions,
    mutant: Mutant,
    reach: Reach,
    *,
    budget: float = inf,
    patience: float = PATIENCE,
) -> Trial:
    """Take the effect out of the copy, run the tests that reach it, and put it back.

    Args:
        tree: The copy.
        sessions: Runs tests in it.
        mutant: The effect.
        reach: The tests that reach it.
        budget: How many seconds of tests to run at most, as measured on the sound code.
        patience: The seconds after which a test has hung, besides a multiple of its usual time.
    """
    began = time.monotonic()
    tests = reach.of(mutant)
    within = list(_within(tests, budget))
    tree.change(mutant.module, without(tree.source(mutant.module), mutant.index))
    noticed, hung = None, False
    try:
        for share in _shares(within):
            noticed, hung = _first_failure(sessions, share, patience)
            if noticed is not None:
                break
    finally:
        tree.restore(mutant.module)
    seconds = time.monotonic() - began
    return Trial(mutant, noticed, hung, len(tests), len(within), seconds)


def _first_failure(
    sessions: Sessions, tests: Sequence[Test], patience: float
) -> tuple[str | None, bool]:
    """The id of the first test that fails, and whether it hung."""
    noticed, hung = None, False
    paths = list(dict.fromkeys(test.path for test in tests))
    limit = patience + _FACTOR * max(test.seconds for test in tests)
    simulated = tests[0].simulated
    ids = [test.id for test in tests]
    for event in sessions.run(paths, simulated=simulated, limit=limit, tests=ids):
        if noticed is None and event["event"] in ("failed", "hung"):
            noticed, hung = event["test"], event["event"] == "hung"
    return noticed, hung


def _within(tests: Sequence[Test], budget: float) -> Iterator[Test]:
    for test in tests:
        budget -= test.seconds
        if budget < 0:
            return
        yield test


def _shares(tests: Sequence[Test]) -> Iterator[list[Test]]:
    """The tests in runs of a growing size, each on the host or on simulated GPUs."""
    elapsed, number = 0.0, []
    for test in tests:
        number.append(sum(elapsed >= share for share in _SHARES))
        elapsed += test.seconds
    pairs = zip(number, tests, strict=True)
    for _, group in groupby(pairs, key=lambda pair: (pair[0], pair[1].simulated)):
        yield [test for _, test in group]
