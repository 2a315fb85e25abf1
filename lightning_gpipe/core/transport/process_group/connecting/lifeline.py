"""Watches processes that no pipeline connects: those that start, and those of other replicas."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from lightning_gpipe.core.transport.interface import RankFailed
from lightning_gpipe.core.transport.process_group.connecting.groups import connect


class Lifeline:
    """Lets all processes hear this one, and knows which have failed or are lost.

    It is made in all processes at once, and watches until it is closed or freed: while pipelines
    run and after that. Pipelines over all processes with the same ``lost_after`` share its office.

    Args:
        lost_after: How long a process may be silent until it is lost; None for 30 seconds.
    """

    def __init__(self, lost_after: timedelta | None = None) -> None:
        self._connection = connect(None, lost_after, ())
        self._office = self._connection.office
        self._connection.keep()

    def tell(self, error: BaseException) -> None:
        """Tell all others that this process has failed."""
        self._office.tell(error)

    def failure(self, within: float) -> RankFailed | None:
        """Return an error that names a process that has failed or ended, or None after a time."""
        failure = self._office.failure(within) or self._office.absence()
        return None if failure is None else failure.error(self._connection.ranks)

    def on_lost_wait(self, act: Callable[[], None]) -> None:
        """Call ``act``, a method of a living object, when waiting for a process is in vain."""
        self._office.on_lost_wait(act)

    def close(self) -> None:
        """Close the connection: ending is no failure from here on."""
        self._connection.close()
