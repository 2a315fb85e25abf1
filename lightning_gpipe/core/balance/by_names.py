"""A balance by the names of the modules where stages begin."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise


def counts_between(
    starts: Sequence[str], units: Sequence[str], name: str = "module", path: str = ""
) -> list[int]:
    """Return the number of units in each stage, by the names of the modules where stages begin.

    >>> counts_between(["down.1", "up"], ["down.0", "down.1.conv", "down.1.norm", "up"])
    [1, 2, 1]

    The first stage begins at the first unit, whether it is among the names or not. A name stands
    for the first unit within it.

    Args:
        starts: The names, in order, relative to the whole model or to the pipelined module.
        units: The names of all units, in order.
        name: The user's name for the pipelined module, for error messages.
        path: Its path in the whole model.
    """
    indices = [_first(start, units, name, path) for start in starts]
    if any(one >= other for one, other in pairwise(indices)):
        raise ValueError(
            f"balance must name the modules where stages begin in their order: got "
            f"{list(starts)}, which are numbers {indices} of the {len(units)} units of {name}."
        )
    bounds = dict.fromkeys([0, *indices, len(units)])
    return [end - begin for begin, end in pairwise(bounds)]


def _first(start: str, units: Sequence[str], name: str, path: str) -> int:
    """The index of the first unit that is ``start``, or within it."""
    for k, unit in enumerate(units):
        if f"{unit}.".startswith((f"{start}.", f"{path}.{start}.")):
            return k
    listed = ", ".join(map(repr, dict.fromkeys(units)))
    raise ValueError(
        f"balance must name modules where stages begin: got {start!r}, and no unit of {name} is "
        f"that or is within it. The units are {listed}."
    )
