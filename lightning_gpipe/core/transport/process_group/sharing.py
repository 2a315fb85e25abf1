"""One office for all pipelines over the same processes.

Two pipelines that are made one after another, such as a generator and a discriminator, know nothing
of one another. But a process that fails in one of them comes to none, so all of them must end. So
they share an office, if all processes have one to share: a process may have freed its earlier
pipelines, and another one not yet.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from datetime import timedelta
from itertools import count
from typing import NamedTuple
from weakref import WeakSet

from torch.distributed import ProcessGroup

from lightning_gpipe.core.transport.process_group.office import Office


class Place(NamedTuple):
    """Where an office is, and on which terms.

    Attributes:
        world: The process group of all processes.
        ranks: Those of its processes in it.
        lost_after: After how long a process that is not heard is lost.
    """

    world: ProcessGroup | None
    ranks: tuple[int, ...]
    lost_after: timedelta


class Shared:
    """An office, and what shares it.

    Args:
        office: The office.
        place: Where it is.
        name: The same in all processes, and of no other one.

    Attributes:
        office: As given.
        pipelines: The names of all pipelines there have been, by their numbers.
        ranks: Those of its processes among all.
    """

    def __init__(self, office: Office, place: Place, name: str) -> None:
        self.office = office
        self.ranks = place.ranks
        self._place = place
        self._name = name
        self._process = os.getpid()
        self._number = next(_NUMBERS)
        self.pipelines: list[str] = []
        self._users = 0
        self._keepers: WeakSet[object] = WeakSet()
        _SHARED.add(self)

    @classmethod
    def at(cls, place: Place) -> Shared | None:
        """The latest that further pipelines can share, if there is one.

        Earlier ones may be there in some processes only, where they are not freed yet.
        """
        found = [each for each in _SHARED if each._is_at(place)]
        return max(found, key=lambda each: each._number, default=None)

    @classmethod
    def held_at(cls, place: Place) -> Shared | None:
        """The same, which is shared from now on until :meth:`leave`.

        While the processes meet, the garbage collector may free the last pipeline that uses it.
        """
        found = cls.at(place)
        if found is None:
            return None
        found.enter(())
        if found.office.lost is None:
            return found
        found.leave()  # it was freed just before
        return cls.held_at(place)

    def _is_at(self, place: Place) -> bool:
        sound = self._process == os.getpid() and self.office.lost is None and self._users > 0
        return sound and self._place == place

    @property
    def state(self) -> str:
        """The same in all processes that have done the same."""
        return ":".join(map(str, (self._name, len(self.pipelines), *self.office.state)))

    def enter(self, pipelines: Sequence[str]) -> int:
        """Share it, for pipelines of these names; returns the number of the first of them."""
        self._users += 1
        self.pipelines += pipelines
        return len(self.pipelines) - len(pipelines)

    def keep(self, keeper: object) -> None:
        """Let other processes hear this one for as long as ``keeper`` lives, or releases it."""
        self._keepers.add(keeper)
        self.office.listen()

    def release(self, keeper: object) -> None:
        """End that, with all pipelines unless another keeper lives."""
        self._keepers.discard(keeper)
        self.close()

    def close(self) -> None:
        """End the pipelines: to end is no failure from here on."""
        if self._keepers:
            self.office.pause()
        else:
            self.office.close()

    def leave(self) -> None:
        """Do not share it any more; it ends with the last."""
        self._users -= 1
        if not self._users:
            self.office.leave()


# State of the process, as the process groups of torch.distributed are.
_SHARED: WeakSet[Shared] = WeakSet()
_NUMBERS = count()


class Connection:
    """What connects the processes of one pipeline, or of several that are made together.

    Args:
        shared: What all pipelines over these processes send and receive by.
        pipelines: Their names.

    Attributes:
        office: Sends and receives for all pipelines over these processes.
        pipelines: The names of all of them, by their numbers.
        ranks: The ranks of these processes among all.
    """

    def __init__(self, shared: Shared, pipelines: Sequence[str]) -> None:
        self.ranks = shared.ranks
        self.office = shared.office
        self.pipelines = shared.pipelines
        self._shared = shared
        self._first = shared.enter(pipelines)
        weakref.finalize(self, shared.leave)

    def keep(self, keeper: object) -> None:
        """See :meth:`Shared.keep`."""
        self._shared.keep(keeper)

    def release(self, keeper: object) -> None:
        """See :meth:`Shared.release`."""
        self._shared.release(keeper)

    def close(self) -> None:
        """See :meth:`Shared.close`."""
        self._shared.close()

    def number(self, k: int) -> int:
        """The number of pipeline ``k`` among all over these processes."""
        return self._first + k
