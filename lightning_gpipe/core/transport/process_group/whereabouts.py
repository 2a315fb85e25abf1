"""The operations that processes wait for, so that those that wait for different ones end.

Processes that are alive may still wait in vain, each for another one. So each numbers what it does
together with others, by the group that does it, and its heartbeats carry these numbers and what it
waits for::

    rank 0   in checkpoint 3   has come to batch 7
    rank 1   in batch 8        has come to checkpoint 2

Rank 0 waits until rank 1 comes to the third checkpoint, and rank 1 until rank 0 comes to the eighth
batch: a circle, in which nothing moves ever after.
"""

from __future__ import annotations

import json
import sys
import sysconfig
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType

import torch.distributed

_STILL = 4  # beats in a row; a wait that ends by itself, such as for bytes on their way, is shorter
# Nobody's own code: PyTorch, Lightning and all that is installed, Python, and this package.
_LIBRARIES = (
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    str(Path(__file__).parents[3]),
    "<frozen",
)
SAME_CODE = (
    "Let each process run the same code: one alone must not run the model, log, save, validate or "
    "take batches."
)
_COLLECTIVES = str(Path(torch.distributed.__file__).parent)


@dataclass(frozen=True)
class Whereabouts:
    """The present operation of one process, and the line of the user's code that runs.

    Attributes:
        line: The line of the user's code that runs; empty if there is none.
        purpose: What the process waits for; empty if it does not wait for others.
        group: The group whose operation this is; empty if it is an unknown one.
        number: The number of the operation in its group.
        ranks: The global ranks of the group.
        begun: The number of the last operation begun in each group.
        requests: The requests to all processes, see :meth:`Requests.tell`.
    """

    line: str = ""
    purpose: str = ""
    group: str = ""
    number: int = 0
    ranks: Sequence[int] = ()
    begun: Mapping[str, int] = field(default_factory=dict)
    requests: Mapping[str, int] = field(default_factory=dict)

    def waits_for(self, rank: int, other: Whereabouts) -> bool:
        """Return True if this process waits until another one comes, which waits itself."""
        if not self.purpose or not other.purpose:
            return False
        if not self.group:  # nobody knows for whom
            return bool(other.group)
        if (other.group, other.number) == (self.group, self.number):
            return other.purpose != self.purpose
        return rank in self.ranks and other.begun.get(self.group, 0) < self.number

    def __str__(self) -> str:
        at = f" (at {self.line})" if self.line else ""
        return f"waits for {self.purpose}{at}" if self.purpose else f"runs{at}"


class OwnWhereabouts:
    """Records what this process does together with others, in the order in which it begins."""

    def __init__(self) -> None:
        self._begun: dict[str, int] = {}
        self._present: list[Whereabouts] = []  # the innermost is the last

    @contextmanager
    def within(self, group: str, number: int, ranks: Sequence[int], purpose: str) -> Iterator[None]:
        """A ``with`` block that is an operation of a group."""
        self.begin(group, number, ranks, purpose)
        try:
            yield
        finally:
            self.end(group)

    def begin(self, group: str, number: int, ranks: Sequence[int], purpose: str) -> None:
        """Begin an operation, until :meth:`end`."""
        self._begun[group] = number
        present = Whereabouts(purpose=purpose, group=group, number=number, ranks=ranks)
        self._present = [*self._present, present]

    def end(self, group: str) -> None:
        """End the operation of a group, if there is one."""
        self._present = [each for each in self._present if each.group != group]

    def encode(self, requests: Mapping[str, int]) -> str:
        """Return what this process does now, and the requests, as a heartbeat carries them."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        present = (self._present or [Whereabouts(purpose=_collective(frame))])[-1]
        now = {"line": users_line(frame), "begun": {**self._begun}, "requests": requests}
        return json.dumps(asdict(present) | now)


OWN = OwnWhereabouts()  # state of the process, as the process groups of torch.distributed are


# What all connected processes do, by global rank, as their latest heartbeats have told.
OBSERVED: dict[int, Whereabouts] = {}


class Waits:
    """The waits of some processes for one another.

    Args:
        ranks: Their global ranks.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self._latest: dict[int, Whereabouts] = {rank: Whereabouts() for rank in ranks}
        self._beats = dict.fromkeys(ranks, 0)  # for how many each has done the same

    def hear(self, rank: int, encoded: str) -> Whereabouts:
        """Record and return the whereabouts that a beat of a process carries."""
        present = Whereabouts(**json.loads(encoded))
        self._beats[rank] = self._beats[rank] + 1 if present == self._latest[rank] else 0
        self._latest[rank] = OBSERVED[rank] = present
        return present

    def in_vain(self) -> str:
        """Return an error message if some wait for one another and nothing moves, or nothing."""
        stuck = {k: x for k, x in self._latest.items() if self._beats[k] >= _STILL}
        while stuck:
            waiting = {
                k: x
                for k, x in stuck.items()
                if any(x.waits_for(rank, other) for rank, other in stuck.items())
            }
            if len(waiting) == len(stuck):
                break
            stuck = waiting
        if not stuck or (
            len(stuck) < len(self._latest) and not all(x.group for x in stuck.values())
        ):
            return ""  # a process in an operation that has no name may wait for one that moves
        described = "; ".join(f"rank {rank} {x}" for rank, x in sorted(stuck.items()))
        return (
            "all processes must do the same in the same order, but some wait for one another, and "
            f"for different things: {described}. {SAME_CODE}"
        )


def users_line(frame: FrameType | None = None) -> str:
    """Return the innermost line of the user's own code that runs on a thread; empty if none."""
    frame = frame or sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_LIBRARIES):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _collective(frame: FrameType | None) -> str:
    """Return the name of the function of torch.distributed that a thread waits in, if it does."""
    inside = frame is not None and frame.f_code.co_filename.startswith(_COLLECTIVES)
    return f"{frame.f_code.co_name} of torch.distributed" if frame and inside else ""
