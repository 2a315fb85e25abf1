"""The connections to all other processes."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress

from lightning_gpipe.core.transport.process_group.link import Link, Posted
from lightning_gpipe.core.transport.process_group.message import Header


class Links:
    """A connection to each of them.

    Args:
        links: The connections.
    """

    def __init__(self, links: Iterable[Link]) -> None:
        self._by_rank = {link.rank: link for link in links}

    def __getitem__(self, rank: int) -> Link:
        return self._by_rank[rank]

    def __iter__(self) -> Iterator[Link]:
        return iter(self._by_rank.values())

    def start(self) -> None:
        """Receive from all."""
        for link in self:
            link.start()

    def tell(self, header: Header, text: str, lost: Collection[int]) -> list[Posted]:
        """Send a header and a text to all but those that are lost."""
        posted: list[Posted] = []
        for link in self:
            if link.rank not in lost:
                with suppress(RuntimeError):  # it is lost too, as the receiving thread notices
                    posted += link.tell(header, text)
        return posted

    def join(self, timeout: float, lost: Collection[int] = ()) -> None:
        """Wait until nothing is received from any but those that are lost."""
        deadline = time.monotonic() + timeout
        for link in self:
            if link.rank not in lost:
                link.join(max(0.0, deadline - time.monotonic()))

    def cut(self) -> None:
        """End all connections."""
        for link in self:
            link.cut()
