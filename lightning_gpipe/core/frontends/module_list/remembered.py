"""What the forwards of a model have shown, in one state of the thread."""

from __future__ import annotations

from collections.abc import Hashable

from lightning_gpipe.core.frontends.module_list.calls import Learned
from lightning_gpipe.core.frontends.module_list.tape import Tape

_TAPES = 16  # that are kept: one for each kind of arguments of the first block


class Remembered:
    """What later forwards need not find out again.

    Attributes:
        learned: What is known of each kind of call.
    """

    def __init__(self) -> None:
        self.learned: dict[Hashable, Learned] = {}
        self._tapes: dict[Hashable, Tape] = {}

    def tape(self, begun: Hashable) -> Tape:
        """The tape to follow for a forward that begins with such a call; a new one if none is."""
        return self._tapes.get(begun) or Tape()

    def keep(self, begun: Hashable, tape: Tape) -> None:
        """Keep the tape of a forward that began with such a call, in place of an earlier one."""
        if len(self._tapes) >= _TAPES and begun not in self._tapes:
            self._tapes.clear()
        self._tapes[begun] = tape
