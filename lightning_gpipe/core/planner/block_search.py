"""Searches the blocks of a placement for a fast one that fits, by changing how long actions wait.

Most changes of a block are no block: two actions of a worker would start in the same cycle, or one
before another that it needs. Here any change is a block again. The actions of a micro-batch are a
*chain*: F through the stages, B back through them, and each W, which follows its B. Each waits for
a number of clock cycles after the one before, and starts in the next cycle that its worker has free
in all micro-batches. A move changes a wait or two, and is taken if the block is no worse: moves
among equally good blocks matter, as the time changes in steps. The search climbs from several
blocks.

Source: Lin et al., "Tessel: Boosting Distributed Execution of Large DNN Models via Flexible
Schedule Search" (2024), for the search for what repeats, with a solver.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate
from random import Random

from lightning_gpipe.core.schedules import Block

_ROUNDS = 3  # climbs from each block at which the search begins
_SIMULATED = 4  # micro-batches for each worker; how long more of them take follows
_STAYING = 0.2  # the share of moves after which later actions stay where they are
_BACKWARD, _WEIGHTS = 1, 2  # columns of a block

StageNumbers = Sequence[Sequence[float]]  # for each stage those of F, B and W
Turn = tuple[int, int]  # the lap in which an action of a block is, and its place in the chain


@dataclass(frozen=True)
class BlockSearch:
    """The blocks of a placement, how good they are, and climbs to better ones.

    ``times`` are the durations of each stage's F, B and W, ``changes`` the bytes that they add,
    ``memory`` those of each worker. With ``split``, W is in the blocks.
    """

    m: int
    placement: tuple[int, ...]
    times: StageNumbers
    changes: StageNumbers
    memory: tuple[float, ...]
    split: bool

    def climbs(self, blocks: Sequence[Block], tries: int) -> Iterator[Block]:
        """Yield the best block of each climb; some begin at these blocks, some where none waits."""
        even = [[0, *[wait] * (len(self._chain) - 1)] for wait in (0, 1)]
        beginnings = [*map(self.waits, blocks), *even] * _ROUNDS
        score, random = cache(self.score), Random(0)
        for beginning in beginnings:
            block = self.block(beginning)
            for _ in range(tries // len(beginnings)):
                other = self.block(self._moved(self.waits(block), random))
                if score(other) <= score(block):
                    block = other
            yield block

    def block(self, waits: Sequence[int]) -> Block:
        occupied: list[set[int]] = [set() for _ in self.memory]
        columns = [[0] * len(self.placement) for _ in range(2 + self.split)]
        now = -1
        for (column, j), wait in zip(self._chain, waits, strict=True):
            now = 1 + wait + (columns[_BACKWARD][j] if column == _WEIGHTS else now)
            slots = occupied[self.placement[j]]
            while now % self._cycle in slots:
                now += 1
            slots.add(now % self._cycle)
            columns[column][j] = now
        return tuple(zip(*columns, strict=True))

    def waits(self, block: Block) -> list[int]:
        waits, now = [], -1
        for column, j in self._chain:
            before = block[j][_BACKWARD] if column == _WEIGHTS else now
            now = block[j][column]
            waits.append(now - before - 1)
        return waits

    def score(self, block: Block) -> tuple[float, float]:
        """Return the bytes that workers lack and, if they lack none, the time."""
        laps = (divmod(block[j][column], self._cycle) for column, j in self._chain)
        turns = [(lap, p) for _, lap, p in sorted((at, lap, p) for p, (lap, at) in enumerate(laps))]
        missing = 0.0
        for worker, room in enumerate(self.memory):
            own = [(lap, p) for lap, p in turns if self.placement[self._chain[p][1]] == worker]
            first = min(own)[0]
            most = self._peak(tuple((lap - first, p) for lap, p in own))
            missing += max(0.0, most - room)
        return missing, 0.0 if missing else self._time(turns)

    def _moved(self, waits: list[int], random: Random) -> list[int]:
        """Change one wait, after which later actions move too unless the next one makes up."""
        p, cycles = random.randrange(1, len(waits)), random.randint(1, self._cycle)
        change = random.choice((-cycles, cycles))
        waits[p] = max(0, waits[p] + change)
        if random.random() < _STAYING and p + 1 < len(waits):
            waits[p + 1] = max(0, waits[p + 1] - change)
        return waits

    def _time(self, turns: Sequence[Turn]) -> float:
        workers, costs = zip(
            *((self.placement[j], self.times[j][c]) for c, j in self._chain), strict=True
        )
        ends: list[list[float]] = [[] for _ in self._chain]
        free = [0.0] * len(self.memory)
        for p, i in _repeated(turns, min(self.m, _SIMULATED * len(free))):
            worker = workers[p]
            # The first forward needs nothing, and gradients of weights nothing of other workers.
            arrival = ends[p - 1][i] if 0 < p < 2 * len(self.placement) else 0.0
            free[worker] = end = max(free[worker], arrival) + costs[p]
            ends[p].append(end)
        return max(free)

    @cached_property
    def _peak(self) -> Callable[[tuple[Turn, ...]], float]:
        changes = [self.changes[j][column] for column, j in self._chain]

        def peak(turns: tuple[Turn, ...]) -> float:
            in_turn = (changes[p] for p, _ in _repeated(turns, self.m))
            return max(accumulate(in_turn, initial=0.0))

        return cache(peak)

    @cached_property
    def _chain(self) -> list[tuple[int, int]]:
        """The actions of a micro-batch as they are placed: the columns and rows of a block."""
        stages = range(len(self.placement))
        forwards, backwards = [(0, j) for j in stages], [(1, j) for j in reversed(stages)]
        return forwards + backwards + [(2, j) for j in stages if self.split]

    @cached_property
    def _cycle(self) -> int:
        return len(self._chain) // len(self.memory)


def _repeated(turns: Sequence[Turn], m: int) -> Iterator[tuple[int, int]]:
    """Yield the places and micro-batches of all actions in order, by those of micro-batch 0."""
    laps = [lap for lap, _ in turns]
    for now in range(min(laps), max(laps) + m):
        for lap, p in turns:
            if 0 <= now - lap < m:
                yield p, now - lap
