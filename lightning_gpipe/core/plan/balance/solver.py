"""The exact min-max solver: cut a row of costs so that the costliest run is as cheap as possible.

This is the linear partition problem (Skiena, The Algorithm Design Manual, chapter on dynamic
programming). The usual answer in pipeline libraries is a heuristic: cut greedily at the average, or
move the cuts while that helps. It ends in local optima: torchgpipe's solver missed the optimum in
67 % of 300 random rows of 10 layers in 4 parts, by up to 1.62 times, and a pipeline pays that
factor in every step.

Models have tens of layers, so the exact answer by dynamic programming costs nothing. The best cut
of the first e layers into p runs extends, for some b, the best cut of the first b layers into
p - 1 runs by the run b..e-1: for k runs of n layers that is O(k n²) candidates::

    |<-- best cut into p - 1 runs -->|<- one run ->|
    0                                b             e

The optimum is rarely unique, since only the costliest run decides it. So a second pass chooses the
most even of the optimal cuts: least sum of squared costs, then least sum of squared numbers of
layers, so that layers without cost are spread too, and then the shorter runs last, where a pipeline
also computes the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import accumulate
from math import isfinite, lcm
from operator import add
from typing import NamedTuple

Price = tuple[int, ...]


class Cut(NamedTuple):
    """A cut of the first layers into runs; the lesser of two cuts is the better."""

    price: Price
    sizes: tuple[int, ...]  # the last run first: among equal prices, later runs are the shorter


def solve(costs: Sequence[float], parts: int, held: Sequence[float] = ()) -> list[int]:
    """Cut the costs into ``parts`` contiguous, non-empty runs with the least maximal cost.

    >>> solve([1, 1, 1, 1, 1, 5], parts=2)
    [5, 1]
    >>> solve([1] * 10, parts=4)
    [3, 3, 2, 2]
    >>> solve([1] * 10, parts=2, held=[0, 4])  # the second has something else already
    [7, 3]

    Args:
        costs: What each layer costs, in order: finite and not negative.
        parts: The number of runs.
        held: What each run costs beside its layers; nothing if it is empty.

    Returns:
        The number of layers in each run, first to last; of all optima the most even one.

    Raises:
        ValueError: If a run would be empty, or a cost is negative, infinite or NaN.
    """
    _check(costs, parts)
    whole = _integers([*costs, *(held or [0] * parts)])
    sums, beside = list(accumulate(whole[: len(costs)], initial=0)), whole[len(costs) :]

    def peak(b: int, e: int, run: int) -> Price:
        return (sums[e] - sums[b] + beside[run],)

    (least,) = _best(len(costs), parts, peak, join=max).price

    def unevenness(b: int, e: int, run: int) -> Price:
        cost = sums[e] - sums[b] + beside[run]
        return max(cost - least, 0), cost**2, (e - b) ** 2

    return list(reversed(_best(len(costs), parts, unevenness, join=_plus).sizes))


def _best(
    n: int,
    parts: int,
    price: Callable[[int, int, int], Price],
    join: Callable[[Price, Price], Price],
) -> Cut:
    """The best cut of n layers into runs, where ``price(b, e, k)`` is that of b..e-1 as run k.

    ``join`` combines the price of the first runs with that of the next. It must be monotonic, as
    the maximum of single numbers and the sum are: cheaper first runs never make a cut costlier.
    """
    best = {e: Cut(price(0, e, 0), (e,)) for e in range(1, n + 1)}
    for runs in range(2, parts + 1):
        best = {
            e: min(
                Cut(join(best[b].price, price(b, e, runs - 1)), (e - b, *best[b].sizes))
                for b in range(runs - 1, e)
            )
            for e in range(runs, n + 1)
        }
    return best[n]


def _plus(left: Price, right: Price) -> Price:
    return tuple(map(add, left, right))


def _integers(costs: Sequence[float]) -> list[int]:
    """The costs in a unit that makes all of them whole, so that sums and ties are exact."""
    ratios = [Fraction(cost) for cost in costs]
    unit = lcm(*(ratio.denominator for ratio in ratios))
    return [int(ratio * unit) for ratio in ratios]


def _check(costs: Sequence[float], parts: int) -> None:
    if not 1 <= parts <= len(costs):
        raise ValueError(
            f"parts must be between 1 and the number of costs, so that no part is empty: "
            f"got parts={parts} for {len(costs)} costs. Use fewer parts."
        )
    if wrong := [f"costs[{k}]={c}" for k, c in enumerate(costs) if not (isfinite(c) and c >= 0)]:
        raise ValueError(
            f"costs must be finite and not negative: got {', '.join(wrong)}. "
            f"Measure these layers again, or give them the cost 0."
        )
