"""Devices as a user writes them on a command line: ``24GiB``, ``312TFLOPS``, ``0.5``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import inf, isfinite

from lightning_gpipe.core.plan import Place

_BYTES = {"B": 1, **{f"{letter}iB": 2 ** (10 * k) for k, letter in enumerate("KMGT", 1)}}
_BYTES |= {f"{letter}B": 10 ** (3 * k) for k, letter in enumerate("KMGT", 1)}
_OPERATIONS = {f"{letter}FLOPS": 10 ** (3 * k) for k, letter in enumerate("MGTP", 2)}


def bytes_in(text: str) -> float:
    """The bytes of a size such as ``24GiB``.

    Raises:
        ValueError: If it is none.
    """
    return _number(text, _BYTES, "--device-memory must be a size such as 24GiB or 80GB")


def speed_of(text: str) -> tuple[float, bool]:
    """A speed, and whether it is in operations per second and not a factor.

    Raises:
        ValueError: If it is none.
    """
    wrong = "--device-speed must be a factor such as 2, or operations such as 312TFLOPS"
    absolute = text.strip().endswith("FLOPS")
    speed = _number(text, _OPERATIONS if absolute else {"": 1}, wrong)
    if not speed > 0:
        raise ValueError(f"{wrong}, and positive: got {text!r}.")
    return speed, absolute


def places_of(
    devices: int | None, memory: Sequence[str], speed: Sequence[str]
) -> tuple[list[Place], float | None]:
    """The devices, and the operations per second of the first, if speeds are in these.

    Args:
        devices: Their number; None goes by the lists.
        memory: The size of each, one for all, or none.
        speed: The speed of each, one for all, or none.

    Raises:
        ValueError: If sizes or speeds cannot be read, or there are not as many as devices.
    """
    sizes, speeds = [*map(bytes_in, memory)], [*map(speed_of, speed)]
    number = max(len(sizes), len(speeds), 1) if devices is None else devices
    if number < 1:
        raise ValueError(f"--devices must be one at least: got {number}.")
    for name, given in (("--device-memory", sizes), ("--device-speed", speeds)):
        if len(given) not in (0, 1, number):
            raise ValueError(
                f"{name} must have one value for all devices, or one for each: got {len(given)} "
                f"for {number} devices."
            )
    if len({absolute for _, absolute in speeds}) > 1:
        raise ValueError(
            f"--device-speed must have factors only, or operations only: got {' '.join(speed)}."
        )
    absolute = bool(speeds) and speeds[0][1]
    first = speeds[0][0] if absolute else 1.0
    factors = [each / first for each, _ in speeds]
    return [Place(speed=_of(factors, d, 1.0), memory=_of(sizes, d, inf)) for d in range(number)], (
        first if absolute else None
    )


def _of(values: Sequence[float], d: int, otherwise: float) -> float:
    """That of a device: one value is for all."""
    return values[d if len(values) > 1 else 0] if values else otherwise


def _number(text: str, units: dict[str, int], wrong: str) -> float:
    found = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    if found is None or found[2] not in units or found[1].count(".") > 1 or found[1] == ".":
        known = f" The units are {', '.join(units)}." if len(units) > 1 else ""
        raise ValueError(f"{wrong}: got {text!r}.{known}")
    number = float(found[1]) * units[found[2]]
    if not isfinite(number):
        raise ValueError(f"{wrong}: got {text!r}.")
    return number
