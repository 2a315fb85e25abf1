"""Placements: the worker of each stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def looped(n: int, workers: int) -> tuple[int, ...]:
    """Stage j runs on worker j mod ``workers``: with two, stages 0 to 3 on 0, 1, 0, 1."""
    return tuple(j % workers for j in range(n))


def folded(n: int, workers: int) -> tuple[int, ...]:
    """Stages go to the last worker and back: with two, stages 0 to 3 on 0, 1, 1, 0.

    Raises a ValueError if a worker would not have two stages.
    """
    if n != 2 * workers:
        raise ValueError(
            f"stages that go down the devices and back must be two on each: got "
            f"{counted(n, 'stage')} on {counted(workers, 'device')}. Write a balance of "
            f"{2 * workers} numbers, balance='time' with chunks='auto', or another schedule than "
            "those in the form of a V."
        )
    return *range(workers), *reversed(range(workers))


def check_looped(name: str, placement: Sequence[int]) -> None:
    """Refuse a placement other than :func:`looped` for the schedule of this name."""
    workers = 1 + max(placement)
    if tuple(placement) != looped(len(placement), workers):
        raise ValueError(
            f"schedule={name!r} needs stage j on device j mod {workers}: got the stages on devices "
            f"{list(placement)}. schedule='fill_drain' works with any."
        )


def check_folded(name: str, m: int, placement: Sequence[int]) -> None:
    """Refuse a placement other than :func:`folded` for the schedule of this name."""
    if tuple(placement) != folded(len(placement), 1 + max(placement)):
        raise ValueError(
            f"schedule={name!r} needs the stages on the devices in order, and back: got the stages "
            f"on devices {list(placement)}. Write GPipe(..., folded=True)."
        )


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, as in ``1 stage`` or ``2 stages``."""
    return f"{number} {noun}{'s' * (number != 1)}"


def is_number(value: Any) -> bool:
    """Return True for an integer, but not for a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_for_each_stage(name: str, numbers: Sequence[int], stages: int) -> None:
    """Refuse numbers of an argument that are not one for each stage."""
    if len(numbers) != stages:
        raise ValueError(
            f"{name} must have a number for each stage: got {counted(len(numbers), 'number')}, "
            f"{list(numbers)}, for {counted(stages, 'stage')}."
        )
