"""Contestants that do the same step, timed in turns.

A machine is not equally fast all the time: another process starts, a core gets warm. So a round is
one step of each contestant, in turns, and only steps of the same round are compared. Who comes
after whom is drawn anew for each round: after a step on four threads the next one takes longer,
whosever it is. Before anything is timed, all must have computed the same gradients.
"""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import ParamSpec

import torch
from torch import Tensor

P = ParamSpec("P")


@dataclass(frozen=True)
class Contestant:
    """One way to do a step.

    Attributes:
        name: As the report has it.
        step: Does one step, forward and backward of one mini-batch, to its end. A float that it
            returns is how many seconds that took, where the clock around it would say too much.
        gradients: Does one from gradients of None, and returns what it made of them: one tensor per
            parameter, in the order of the plain module.
        threads: How many intra-op threads the calling thread has in the step; None leaves it.
        installed: Whether it can take part; one that cannot keeps its row in the report.
        clear: Drops the gradients that the latest step made.
    """

    name: str
    step: Callable[[], object]
    gradients: Callable[[], Sequence[Tensor]]
    threads: int | None = None
    installed: bool = True
    clear: Callable[[], object] = lambda: None


def competitor(package: str) -> Callable[[Callable[P, Contestant]], Callable[P, Contestant]]:
    """Decorate what makes a contestant of a package that may not be installed.

    Without the package it makes one that is not timed: its row says so, its ratios are unknown.
    """

    def decorate(make: Callable[P, Contestant]) -> Callable[P, Contestant]:
        @wraps(make)
        def made(*args: P.args, **kwargs: P.kwargs) -> Contestant:
            try:
                return make(*args, **kwargs)
            except ModuleNotFoundError as error:
                if (error.name or "").partition(".")[0] != package:
                    raise
            return Contestant(str(kwargs.get("name", package)), list, list, installed=False)

        return made

    return decorate


@dataclass(frozen=True)
class Times:
    """How long one contestant's steps took, in seconds, one per round; none if it took none."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle one."""
        return statistics.median(self.seconds) if self.seconds else math.nan

    @property
    def quartiles(self) -> tuple[float, float]:
        """Between them is the middle half."""
        if len(self.seconds) < 2:
            return self.median, self.median
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return low, high


class Ratio(float):
    """The median of the ratios of several rounds.

    Attributes:
        quartiles: Between them is the middle half of them.
    """

    def __new__(cls, rounds: Sequence[float]) -> Ratio:
        """Make the number of the ratio of each round."""
        times = Times(tuple(rounds))
        ratio = super().__new__(cls, times.median)
        ratio.quartiles = times.quartiles
        return ratio

    quartiles: tuple[float, float]


def agree(
    contestants: Iterable[Contestant], *, rtol: float = 1e-3, atol: float = 1e-5
) -> list[Tensor]:
    """Raise unless all make the same gradients as the first; return those.

    Args:
        contestants: The reference first.
        rtol: How far the largest difference of a parameter's gradient may be from zero, relative to
            the largest entry of that gradient.
        atol: The same for gradients that are close to zero, absolutely.

    Raises:
        AssertionError: Names who differs, in which parameter and by how much.
    """
    reference: list[Tensor] = []
    for contestant in contestants:
        if not contestant.installed:
            continue
        with _threads(contestant.threads):
            found = [gradient.detach().cpu().clone() for gradient in contestant.gradients()]
        reference = reference or found
        assert len(found) == len(reference), (
            f"{contestant.name} must make {len(reference)} gradients: made {len(found)}"
        )
        for k, (gradient, expected) in enumerate(zip(found, reference, strict=True)):
            size = float(expected.abs().max())
            difference = float((gradient - expected).abs().max())
            assert difference <= atol + rtol * size, (
                f"{contestant.name} must compute the same gradients: parameter {k} differs by "
                f"{difference:.2e}, its gradient is up to {size:.2e}"
            )
    return reference


def contest(
    contestants: Sequence[Contestant],
    *,
    rounds: int,
    warm_up: int = 2,
    seed: int = 0,
    synchronize: Callable[[], object] = lambda: None,
) -> dict[str, Times]:
    """Time every contestant once per round, in turns: A B C, C A B, ...

    Args:
        contestants: Who is timed.
        rounds: How many rounds count.
        warm_up: How many come before and do not.
        seed: What the orders of the rounds are drawn by.
        synchronize: Waits until the device is idle.
    """
    seconds: dict[str, list[float]] = {each.name: [] for each in contestants}
    gc.collect()
    gc.freeze()  # what is there already need not be searched for garbage before every step
    for number in range(warm_up + rounds):
        order = random.Random(1000 * seed + number)  # the same in each run
        for each in order.sample(contestants, len(contestants)):
            if not each.installed:
                continue
            with _threads(each.threads), _no_collection():
                synchronize()
                start = time.perf_counter()
                own = each.step()
                synchronize()
                taken = time.perf_counter() - start
            if number >= warm_up:
                seconds[each.name].append(own if isinstance(own, float) else taken)
    gc.unfreeze()
    return {name: Times(tuple(each)) for name, each in seconds.items()}


def in_one(contests: Iterable[Mapping[str, Times]]) -> dict[str, Times]:
    """The rounds of several contests of the same contestants, as those of one."""
    seconds: dict[str, tuple[float, ...]] = {}
    for times in contests:
        for name, each in times.items():
            seconds[name] = seconds.get(name, ()) + each.seconds
    return {name: Times(each) for name, each in seconds.items()}


def ratio(times: Mapping[str, Times], one: str, other: str, *, beyond: str | None = None) -> float:
    """How long ``one`` takes relative to ``other``: the median over the rounds, or NaN.

    Args:
        times: Of one contest.
        one: A contestant.
        other: Another.
        beyond: A third, whose time is taken from both: what it does is not what is compared.
    """
    if not (times[one].seconds and times[other].seconds):
        return math.nan
    base = times[beyond].seconds if beyond else [0.0] * len(times[one].seconds)
    rounds = zip(times[one].seconds, times[other].seconds, base, strict=True)
    return Ratio(tuple((a - c) / (b - c) for a, b, c in rounds))


@contextmanager
def _threads(number: int | None):
    if number is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(number)  # even if it has them: it is what its new threads begin with
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _no_collection():
    """Collect garbage before a step and not within: whose turn it is must not matter."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
