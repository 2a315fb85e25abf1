"""The operations that processes wait for, so that those that wait for different ones end.

Processes that are alive may still wait in vain, each for another one. So each numbers its
operations with others, by the group that does them, and its heartbeats carry these numbers and what
it waits for::

    rank 0   in checkpoint 3   has come to batch 7
    rank 1   in batch 8        has come to checkpoint 2

Rank 0 waits until rank 1 comes to the third checkpoint, and rank 1 until rank 0 comes to the eighth
batch: a circle, in which nothing moves ever after.

The heartbeats go up a tree. Each carries the operations of the processes below it, equal ones
together, and only a few of those that move. So the root sees all that are still, and messages are
short while most move. It tells down the tree what only a few do: the others may wait for those.
"""

from __future__ import annotations

import json
import sys
import sysconfig
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed

from lightning_gpipe.core.transport.process_group.tree import Tree
from lightning_gpipe.core.transport.threads import frames_of_threads

_STILL = 4  # beats in a row; a wait that ends by itself, such as for bytes on their way, is shorter
_FEW = 8  # different things that processes do, and processes that do the same
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
    """The present operation of one process, and the line of the user's code that runs."""

    line: str = ""  # empty if no code of the user's runs
    purpose: str = ""  # what the process waits for; empty if it does not wait for others
    group: str = ""  # whose operation this is; empty if it is an unknown one
    number: int = 0  # of the operation in its group
    ranks: Sequence[Sequence[int]] = ()  # of the group, see ranges_of
    begun: Mapping[str, int] = field(default_factory=dict)  # the last operation begun in each group

    def waits_for(self, rank: int, other: Whereabouts) -> bool:
        """Return True if this process waits until another one comes, which waits itself."""
        if not self.purpose or not other.purpose:
            return False
        if not self.group:  # nobody knows for whom
            return bool(other.group)
        if (other.group, other.number) == (self.group, self.number):
            return other.purpose != self.purpose
        within = any(first <= rank <= last for first, last in self.ranks)
        return within and other.begun.get(self.group, 0) < self.number

    def __str__(self) -> str:
        at = f" (at {self.line})" if self.line else ""
        return f"waits for {self.purpose}{at}" if self.purpose else f"runs{at}"


class OwnWhereabouts:
    """Records the operations of this process with others, in the order in which they begin."""

    def __init__(self) -> None:
        self._begun: dict[str, int] = {}
        self._present: list[Whereabouts] = []  # the innermost is the last

    @contextmanager
    def within(self, group: str, number: int, ranks: Sequence[int], purpose: str) -> Iterator[None]:
        self.begin(group, number, ranks, purpose)
        try:
            yield
        finally:
            self.end(group)

    def next(self, group: str, ranks: Sequence[int], purpose: str) -> AbstractContextManager[None]:
        """A ``with`` block that is the next operation of a group since :meth:`forget`."""
        return self.within(group, self._begun.get(group, 0) + 1, ranks, purpose)

    def forget(self, *groups: str) -> None:
        """Number the operations of these groups from the first one again."""
        for group in groups:
            self._begun.pop(group, None)

    def begin(self, group: str, number: int, ranks: Sequence[int], purpose: str) -> None:
        self._begun[group] = number
        present = Whereabouts("", purpose, group, number, ranges_of(ranks))
        self._present = [*self._present, present]

    def end(self, group: str) -> None:
        self._present = [each for each in self._present if each.group != group]

    def now(self) -> Whereabouts:
        with frames_of_threads() as frame_of:
            return self._seen(frame_of.get(threading.main_thread().ident or 0))

    def _seen(self, frame: FrameType | None) -> Whereabouts:
        present = (self._present or [Whereabouts(purpose=_collective(frame))])[-1]
        return replace(present, line=users_line(frame), begun={**self._begun})


OWN = OwnWhereabouts()  # state of the process, as the process groups of torch.distributed are


# What connected processes do, by global rank, as far as few others do the same.
OBSERVED: dict[int, Whereabouts] = {}

# Whereabouts as text, whether they are still, and the global ranks of the processes.
_Entry = tuple[str, bool, list[int]]


class Waits:
    """The waits of some processes, by their global ranks, for one another."""

    def __init__(self, ranks: Sequence[int], tree: Tree, rank: int) -> None:
        self._ranks = ranks
        self._rank = ranks[rank]
        self._is_root = tree.parent(rank) is None
        # What the root knows of a process is as many beats older as there are between them.
        self._still = _STILL + max(0, tree.depth - 1)
        self._latest = ""
        self._beats = 0  # for how many this process has done the same
        self._below: dict[int, list[_Entry]] = {}  # as each child has told
        self._seen: list[_Entry] = []  # what few do, as the parent has told
        self._in_vain = ""  # the same

    def observe(self, own: Whereabouts) -> None:
        latest = json.dumps(asdict(own))
        self._beats = self._beats + 1 if latest == self._latest else 0
        self._latest = latest

    def to_parent(self) -> list[Any]:
        entries = self._entries()
        still = [entry for entry in entries if entry[1]]
        moving = [entry for entry in entries if not entry[1]]
        return _encode([*still, *moving[:_FEW]])

    def to_children(self) -> list[Any]:
        """Return the operations of only few processes, and whether some wait in vain."""
        if self._is_root:
            self._see(self._entries()[:_FEW])
        return [_encode(self._seen), self._in_vain]

    def hear_child(self, rank: int, told: list[Any]) -> None:
        self._below[rank] = _decode(told)

    def hear_parent(self, told: list[Any]) -> None:
        seen, self._in_vain = told
        self._see(_decode(seen))

    def _see(self, entries: list[_Entry]) -> None:
        self._seen = [(text, still, ranks[:_FEW]) for text, still, ranks in entries]
        for rank in self._ranks:
            OBSERVED.pop(rank, None)
        for text, _, ranks in self._seen:
            OBSERVED.update(dict.fromkeys(ranks, Whereabouts(**json.loads(text))))

    def _entries(self) -> list[_Entry]:
        """Return the operations of this process and those below it, the rarest first."""
        found: dict[tuple[str, bool], list[int]] = {}
        own = self._latest, self._beats >= self._still, [self._rank]
        for text, still, ranks in chain([own], *list(self._below.values())):
            found.setdefault((text, still), []).extend(ranks)
        return sorted(((*key, sorted(ranks)) for key, ranks in found.items()), key=_number)

    def in_vain(self) -> str:
        """Return an error message, which the root finds, if some wait in vain; else nothing."""
        if self._is_root:
            self._in_vain = self._find()
        return self._in_vain

    def _find(self) -> str:
        entries = [entry for entry in self._entries() if entry[1]]
        stuck = [(Whereabouts(**json.loads(text)), ranks) for text, _, ranks in entries]
        while stuck:
            waiting = [
                (x, ranks)
                for x, ranks in stuck
                if any(x.waits_for(rank, other) for other, others in stuck for rank in others)
            ]
            if len(waiting) == len(stuck):
                break
            stuck = waiting
        number = sum(len(ranks) for _, ranks in stuck)
        if not stuck or (number < len(self._ranks) and not all(x.group for x, _ in stuck)):
            return ""  # a process in an operation that has no name may wait for one that moves
        each = sorted((rank, str(x)) for x, ranks in stuck for rank in ranks[:_FEW])
        described = "; ".join(f"rank {rank} {text}" for rank, text in each[:_FEW])
        more = f"; and {number - _FEW} more" * (number > _FEW)
        return (
            "all processes must do the same in the same order, but some wait for one another, and "
            f"for different things: {described}{more}. {SAME_CODE}"
        )


def ranges_of(ranks: Sequence[int]) -> list[list[int]]:
    """Return the first and the last of each run of consecutive ranks, which are in order."""
    ranges: list[list[int]] = []
    for rank in ranks:
        if ranges and ranges[-1][1] == rank - 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    return ranges


def _encode(entries: list[_Entry]) -> list[Any]:
    return [(text, still, ranges_of(ranks)) for text, still, ranks in entries]


def _decode(told: list[Any]) -> list[_Entry]:
    return [
        (text, still, [rank for first, last in ranges for rank in range(first, last + 1)])
        for text, still, ranges in told
    ]


def _number(entry: _Entry) -> int:
    return len(entry[2])


def users_line(frame: FrameType | None = None) -> str:
    """Return the innermost line of the user's own code that runs on a thread; empty if none."""
    frame = frame or sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_LIBRARIES):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _collective(frame: FrameType | None) -> str:
    inside = frame is not None and frame.f_code.co_filename.startswith(_COLLECTIVES)
    return f"{frame.f_code.co_name} of torch.distributed" if frame and inside else ""
