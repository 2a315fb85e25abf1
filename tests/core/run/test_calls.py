"""Cost: the number of calls of the engine's functions, the same on every machine.

A call takes part of a microsecond, and a nearly empty layer takes some ten. A feature that is not
in use must cost nothing. Time does not show it where one of many does; these numbers do.
"""

from __future__ import annotations

from tests.support.calls import Way, counts
from tests.support.ranks import new_ranks

# Calls for each pair of stage and micro-batch, and beside those for each mini-batch, with a margin.
# Counted with Python 3.11; in later versions comprehensions are no calls.
AT_MOST: dict[Way, tuple[int, int]] = {
    "never": (44, 680),
    "always": (112, 720),
    "1f1b": (96, 648),
}


def test_calls_of_a_step() -> None:
    with new_ranks(1) as ranks:  # in which nothing has run
        [found] = ranks.run(counts)

    for way, (per_pair, per_minibatch) in found.items():
        pairs, minibatch = AT_MOST[way]
        assert per_pair <= pairs, way
        assert per_minibatch <= minibatch, way
