"""One office for all pipelines over the same processes.

Two pipelines that are made one after another, such as a generator and a discriminator, know nothing
of one another. But a process that fails in one of them comes to none, so all must end: they share
an office, if every process still has one. One process may have freed its earlier pipelines already.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import NamedTuple
from weakref import WeakKeyDictionary, WeakSet

from torch.distributed import ProcessGroup

from lightning_gpipe.core.transport.process_group.connecting.gpus import GpuTable
from lightning_gpipe.core.transport.process_group.office import Office


class Peers(NamedTuple):
    """The processes that an office connects, and how long one may be silent until it is lost."""

    world: ProcessGroup | None
    ranks: tuple[int, ...]
    lost_after: timedelta


class SharedOffice:
    """An office with a name that is the same in all processes, and the connections that share it.

    ``pipelines`` are the names of all so far; for its ``keepers`` other processes hear this one.
    """

    def __init__(self, office: Office, peers: Peers, name: str) -> None:
        self.office = office
        self.pipelines: list[str] = []
        self.keepers: WeakSet[Connection] = WeakSet()
        self._peers = peers
        self.name = name
        self._process = os.getpid()
        self._users = 0
        office.on_lost = partial(_spread_loss, peers.world)
        _OFFICES[self] = None

    @classmethod
    def latest(cls, peers: Peers) -> SharedOffice | None:
        """Return the latest office between ``peers`` that can be shared, or None."""
        offices = [shared for shared in _OFFICES if shared._connects(peers)]
        return offices[-1] if offices else None

    @classmethod
    def enter_latest(cls, peers: Peers) -> SharedOffice | None:
        """Enter the latest office, if any, until :meth:`leave`: it is not collected meanwhile."""
        while (shared := cls.latest(peers)) is not None:
            shared.enter(())
            if shared.office.ledger.lost is None:
                return shared
            shared.leave()  # it was freed just before
        return None

    def _connects(self, peers: Peers) -> bool:
        sound = self._process == os.getpid() and self.office.ledger.lost is None and self._users > 0
        return sound and self._peers == peers

    @property
    def state(self) -> str:
        """A text that is the same in all processes that have done the same."""
        return ":".join(map(str, (self.name, len(self.pipelines), *self.office.ledger.state)))

    def enter(self, pipelines: Sequence[str]) -> int:
        self._users += 1
        self.pipelines += pipelines
        return len(self.pipelines) - len(pipelines)

    def leave(self) -> None:
        self._users -= 1
        if not self._users:
            self.office.leave()


# State of the process, as the process groups of torch.distributed are.
_OFFICES: WeakKeyDictionary[SharedOffice, None] = WeakKeyDictionary()  # the latest is the last


def _spread_loss(world: ProcessGroup | None, ranks: Sequence[int], how: str) -> None:
    for shared in list(_OFFICES):
        if shared._peers.world is world:
            shared.office.hear_of_loss(ranks, how)


class Connection:
    """Connects the processes of one pipeline, or of several that are made together.

    ``pipelines`` are the names of all pipelines over these processes; its own begin with number
    ``first``. ``gpus`` are those of their workers, if tensors go straight between them.
    """

    def __init__(self, shared: SharedOffice, pipelines: Sequence[str]) -> None:
        self.office = shared.office
        self.pipelines = shared.pipelines
        self._keepers = shared.keepers
        self.first = shared.enter(pipelines)
        self.gpus: GpuTable | None = None
        weakref.finalize(self, shared.leave)

    def keep(self) -> None:
        """Let other processes hear this one for as long as this connection lives, or is open."""
        self._keepers.add(self)
        self.office.listen()

    def close(self) -> None:
        """End the pipelines; a process that ends after this has not failed."""
        self._keepers.discard(self)
        if self._keepers:
            self.office.pause()
        else:
            self.office.close()
