"""The tree over which many processes talk, so that none is connected with all others.

Each process has up to eight children. What all must know goes up to the root and down again, in as
many rounds as the tree is deep: four for a thousand processes, and one for nine::

    0 -+- 1 -+- 9 ...         8 -+- 7 -+- ...
       +- 2  +- 16               +- 6  +- ...
       +- 8                      +- 0

Trees with different roots have different inner processes, so that none has two families.
"""

from __future__ import annotations

from dataclasses import dataclass

FAN_OUT = 8


@dataclass(frozen=True)
class Tree:
    """A tree of ``size`` processes by their ranks; each has ``fan_out`` children at most."""

    size: int
    root: int = 0
    fan_out: int = FAN_OUT

    def parent(self, rank: int) -> int | None:
        place = self._swap(rank)
        return self._swap((place - 1) // self.fan_out) if place else None

    def children(self, rank: int) -> list[int]:
        first = self.fan_out * self._swap(rank) + 1
        places = range(first, min(first + self.fan_out, self.size))
        return [self._swap(place) for place in places]

    def neighbours(self, rank: int) -> list[int]:
        parent = self.parent(rank)
        return [*([] if parent is None else [parent]), *self.children(rank)]

    def next_hop(self, rank: int, to: int) -> int:
        """Return the neighbour of a process that is nearest to another one."""
        own, place, last = self._swap(rank), self._swap(to), self._swap(to)
        while place > own:  # an ancestor has a smaller place
            place, last = (place - 1) // self.fan_out, place
        return self._swap(last if place == own else (own - 1) // self.fan_out)

    @property
    def depth(self) -> int:
        place, steps = self.size - 1, 0
        while place > 0:
            place, steps = (place - 1) // self.fan_out, steps + 1
        return steps

    def _swap(self, rank: int) -> int:
        """Return the place of a process, counted from the root; or the process of a place."""
        return (self.root - rank) % self.size if self.root else rank
