"""What comes for exchanges: for the one that runs, or for one that this process has not begun."""

from __future__ import annotations

from typing import Protocol

from lightning_gpipe.core.transport.process_group.ledger import Verdict
from lightning_gpipe.core.transport.process_group.link import Mail
from lightning_gpipe.core.transport.process_group.message import Header


class Recipient(Protocol):
    """An exchange, which gets what comes for it."""

    def arrive(self, rank: int, header: Header, mail: Mail) -> None:
        """Take a value from a process."""

    def fail(self, verdict: Verdict) -> None:
        """End, because another process has failed."""


class Reception:
    """Knows the exchange that runs, and keeps what comes for later ones; used by one at a time.

    Attributes:
        recipient: The exchange that runs, if one does.
    """

    def __init__(self) -> None:
        self.recipient: Recipient | None = None
        self._early: dict[int, list[tuple[int, Header, Mail]]] = {}

    def begin(self, serial: int, recipient: Recipient) -> list[tuple[int, Header, Mail]]:
        """Let an exchange run; returns what has come for it."""
        self.recipient = recipient
        return self._early.pop(serial, [])

    def fail(self, serial: int) -> None:
        """End the exchange that runs, and forget what has come for those up to ``serial``."""
        self.recipient = None
        self._early = {number: each for number, each in self._early.items() if number > serial}

    def take(self, serial: int, rank: int, header: Header, mail: Mail) -> Recipient | None:
        """The exchange that a value is for, if it runs.

        Args:
            serial: The number of the exchange that runs, or of the last one.
            rank: Who has sent the value.
            header: What came before it.
            mail: The value.
        """
        if header.serial > serial:
            self._early.setdefault(header.serial, []).append((rank, header, mail))
        return self.recipient if header.serial == serial else None  # else of one that has failed
