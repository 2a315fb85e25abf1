"""The devices of a plan, by the options of the command: their memory, speed and connections."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from math import inf, isfinite

from lightning_gpipe.core.balance import Place

_BYTES = {"B": 1, **{f"{letter}iB": 2 ** (10 * k) for k, letter in enumerate("KMGT", 1)}}
_BYTES |= {f"{letter}B": 10 ** (3 * k) for k, letter in enumerate("KMGT", 1)}
_WRITTEN = re.compile(r"((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?)\s*([A-Za-z/]*)")
_OPERATIONS = {f"{letter}FLOPS": 10 ** (3 * k) for k, letter in enumerate("MGTP", 2)}


def places_of(
    devices: int | None,
    memory: Sequence[str],
    speed: Sequence[str],
    host_speed: str | None = None,
    replica_speed: str | None = None,
) -> tuple[list[Place], float | None]:
    """Return the devices, and the operations per second of the first if speeds are absolute.

    The lists have a value for each device, one for all, or none. Without a number of devices, that
    of the lists counts. ``host_speed`` and ``replica_speed`` are for all.

    Raises:
        ValueError: If a value cannot be parsed, or the number of values is not that of the devices.
    """
    wrong = "--device-memory must be a size such as 24GiB or 80GB"
    sizes = [_number(text, _BYTES, wrong) for text in memory]
    speeds = [*map(_speed_of, speed)]
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
    first = next((value for value, absolute in speeds if absolute), None)
    bus = _way("--host-speed", host_speed, Place.host_speed)
    across = _way("--replica-speed", replica_speed, Place.replica_speed)
    factors = _for_each([value / (first or 1.0) for value, _ in speeds] or [1.0], number)
    places = zip(factors, _for_each(sizes or [inf], number), strict=True)
    made = [Place(speed=x, memory=size, host_speed=bus, replica_speed=across) for x, size in places]
    return made, first


def stages_places(places: Sequence[Place], replicas: int, shards: int) -> list[Place]:
    """Return the devices of the stages of one replica, each of which stands for all shards."""
    return _together(_of_replica(places, replicas), shards)


def _of_replica(places: Sequence[Place], replicas: int) -> list[Place]:
    """Return the devices of one replica, each as slow and small as the worst in its place."""
    if len(places) % replicas:
        raise ValueError(
            f"--devices must be a multiple of replicas: got {len(places)} devices for {replicas} "
            "pipelines."
        )
    size = len(places) // replicas
    alike = [places[k::size] for k in range(size)]
    return [
        replace(
            those[0],
            speed=min(place.speed for place in those),
            memory=min(place.memory for place in those),
        )
        for those in alike
    ]


def _together(places: Sequence[Place], shards: int) -> list[Place]:
    """Return ``shards`` neighbouring devices each as one, as slow as the slowest of them."""
    if len(places) % shards:
        raise ValueError(
            f"--devices must be a multiple of tensor_parallel: got {len(places)} devices for "
            f"stages of {shards}."
        )
    groups = [places[k : k + shards] for k in range(0, len(places), shards)]
    return [
        replace(
            group[0],
            speed=shards * min(place.speed for place in group),
            memory=shards * min(place.memory for place in group),
            host_speed=shards * group[0].host_speed,
            replica_speed=shards * group[0].replica_speed,
        )
        for group in groups
    ]


def _speed_of(text: str) -> tuple[float, bool]:
    """Parse a speed; returns also whether it is in operations per second and not a factor."""
    wrong = "--device-speed must be a factor such as 2, or operations such as 312TFLOPS"
    absolute = text.strip().endswith("FLOPS")
    speed = _number(text, _OPERATIONS if absolute else {"": 1}, wrong)
    if not speed > 0:
        raise ValueError(f"{wrong}, and positive: got {text!r}.")
    return speed, absolute


def _way(name: str, speed: str | None, default: float) -> float:
    units = {f"{unit}/s": size for unit, size in _BYTES.items()}
    wrong = f"{name} must be bytes per second such as 20GB/s"
    return default if speed is None else _number(speed, units, wrong)


def _for_each(values: list[float], number: int) -> list[float]:
    return values * number if len(values) == 1 else values


def _number(text: str, units: dict[str, int], wrong: str) -> float:
    match = _WRITTEN.fullmatch(text.strip())
    number = float(match[1]) * units.get(match[2], inf) if match else inf
    if not isfinite(number):
        names = f" The units are {', '.join(units)}." if len(units) > 1 else ""
        raise ValueError(f"{wrong}: got {text!r}.{names}")
    return number
