"""The messages that this process passes on to the others that it is connected with.

A process is connected with some others only. So it passes on what all must know, and as each of
them does so too, the message comes back to it. And a thousand processes may fail in the same run,
or close after the same exchange: all must know of the first, whichever they hear of first. So a
process passes on a message only if it is earlier than all before it about the same::

    heard about run 0   exchange 7   exchange 7   exchange 4   exchange 7
    passed on           yes          no           yes          no
"""

from __future__ import annotations

from collections.abc import Hashable


class Gossip:
    """Remembers the earliest message about each thing."""

    def __init__(self) -> None:
        self._earliest: dict[Hashable, tuple[int, ...]] = {}

    def is_news(self, about: Hashable, *when: int) -> bool:
        """Return True for a message that is earlier than all others about the same so far."""
        if about in self._earliest and when >= self._earliest[about]:
            return False
        self._earliest[about] = when
        return True
