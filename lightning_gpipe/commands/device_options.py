"""Parses the memory and speed of devices: ``24GiB``, ``312TFLOPS``, ``0.5``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import inf, isfinite

from lightning_gpipe.core.balance import Place

_BYTES = {"B": 1, **{f"{letter}iB": 2 ** (10 * k) for k, letter in enumerate("KMGT", 1)}}
_BYTES |= {f"{letter}B": 10 ** (3 * k) for k, letter in enumerate("KMGT", 1)}
_OPERATIONS = {f"{letter}FLOPS": 10 ** (3 * k) for k, letter in enumerate("MGTP", 2)}


def bytes_in(text: str) -> float:
    """Parse a size such as ``24GiB``, in bytes."""
    return _number(text, _BYTES, "--device-memory must be a size such as 24GiB or 80GB")


def speed_of(text: str) -> tuple[float, bool]:
    """Parse a speed; returns also whether it is in operations per second and not a factor."""
    wrong = "--device-speed must be a factor such as 2, or operations such as 312TFLOPS"
    absolute = text.strip().endswith("FLOPS")
    speed = _number(text, _OPERATIONS if absolute else {"": 1}, wrong)
    if not speed > 0:
        raise ValueError(f"{wrong}, and positive: got {text!r}.")
    return speed, absolute


def places_of(
    devices: int | None, memory: Sequence[str], speed: Sequence[str]
) -> tuple[list[Place], float | None]:
    """Return the devices, and the operations per second of the first if speeds are absolute.

    The lists have a value for each device, one for all, or none. Without a number of devices, that
    of the lists counts.

    Raises:
        ValueError: If a value cannot be parsed, or the number of values is not that of the devices.
    """
    sizes, speeds = [*map(bytes_in, memory)], [*map(speed_of, speed)]
    number = max(len(sizes), len(speeds), 1) if devices is None else devices
    if number < 1:
        raise ValueError(f"--devices must be one at least: got {number}.")
    for name, values in (("--device-memory", sizes), ("--device-speed", speeds)):
        if len(values) not in (0, 1, number):
            raise ValueError(
                f"{name} must have one value for all devices, or one for each: got {len(values)} "
                f"for {number} devices."
            )
    if len({absolute for _, absolute in speeds}) > 1:
        raise ValueError(
            f"--device-speed must have factors only, or operations only: got {' '.join(speed)}."
        )
    absolute = bool(speeds) and speeds[0][1]
    first = speeds[0][0] if absolute else 1.0
    factors = _for_each([value / first for value, _ in speeds] or [1.0], number)
    places = zip(factors, _for_each(sizes or [inf], number), strict=True)
    return [Place(speed=x, memory=size) for x, size in places], first if absolute else None


def _for_each(values: list[float], number: int) -> list[float]:
    """The option for each device; a single value applies to all."""
    return values * number if len(values) == 1 else values


def _number(text: str, units: dict[str, int], wrong: str) -> float:
    match = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2] not in units or match[1].count(".") > 1 or match[1] == ".":
        names = f" The units are {', '.join(units)}." if len(units) > 1 else ""
        raise ValueError(f"{wrong}: got {text!r}.{names}")
    number = float(match[1]) * units[match[2]]
    if not isfinite(number):
        raise ValueError(f"{wrong}: got {text!r}.")
    return number
