"""The generators of Python's ``random`` and ``numpy.random``, of which a process has one each.

Nothing can stand in for them, as private generators do for PyTorch's. If all stages run on the
caller's thread their states are saved and restored for a recomputation, like those of any generator
that one worker has to itself. On threads the stages draw by turns, in an order that the operating
system decides: what they draw is not reproducible, and a recomputation would draw others.
"""

from __future__ import annotations

import random
import sys
from typing import Any

from lightning_gpipe.core.plan import Slot

LibraryState = tuple[Any, ...]


class LibraryGenerators:
    """Both generators; NumPy's only if it was imported."""

    def get_state(self) -> LibraryState:
        """Their states."""
        numpy = sys.modules.get("numpy.random")
        return random.getstate(), None if numpy is None else numpy.get_state()

    def set_state(self, state: LibraryState) -> None:
        """Set their states."""
        python, numpy = state
        random.setstate(python)
        if numpy is not None:
            sys.modules["numpy.random"].set_state(numpy)

    def moved(self, state: LibraryState) -> list[str]:
        """The names of those that were drawn from since they had ``state``."""
        python, numpy = self.get_state()
        moved = ["random"] if python != state[0] else []
        if numpy is None or state[1] is None:  # imported since, and perhaps not drawn from
            return moved
        (_, keys, *place), (_, before, *old) = numpy, state[1]
        same = place == old and (keys == before).all()
        return moved if same else [*moved, "numpy.random"]


class LibrarySnapshot:
    """The states before a whole forward, which may have to be run again."""

    lost: Slot | None = None

    def __init__(self) -> None:
        self._generators = LibraryGenerators()
        self._state = self._generators.get_state()

    def restore(self) -> None:
        """Restore the states."""
        self._generators.set_state(self._state)
