"""Watches processes that no pipeline connects: those that start, and those of other replicas."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from lightning_gpipe.core.transport.interface import RankFailed
from lightning_gpipe.core.transport.process_group.groups import connect


class Lifeline:
    """Lets all processes hear this one, and knows who has failed or is lost.

    It is made in all processes at once, and watches until it is closed, or for as long as it lives:
    while pipelines run and after that. Pipelines over all processes, with the same bound, share
    what it sends and receives by.

    Args:
        lost_after: After how long a process that is not heard is lost; None for 30 seconds.

    Raises:
        RuntimeError: If others do not come.
    """

    def __init__(self, lost_after: timedelta | None = None) -> None:
        self._connection = connect(None, lost_after, ())
        self._office = self._connection.office
        self._connection.keep(self)

    def tell(self, error: BaseException) -> None:
        """Tell all others that this process has failed."""
        self._office.tell(error)

    def failure(self, within: float) -> RankFailed | None:
        """How another process has failed, or that it has ended, if one has.

        Args:
            within: How many seconds to wait until that is known.
        """
        found = self._office.failure(within) or self._office.absence()
        return None if found is None else RankFailed(found.text(self._connection.ranks))

    def when_in_vain(self, act: Callable[[], None]) -> None:
        """Call ``act``, on another thread, when it is in vain to wait for another process.

        Args:
            act: A method of an object, for as long as that lives.
        """
        self._office.when_in_vain(act)

    def close(self) -> None:
        """End it: to end is no failure from here on."""
        self._connection.release(self)
