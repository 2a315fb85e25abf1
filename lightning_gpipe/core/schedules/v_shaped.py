"""Schedules on two stages for each device whose memory is chosen: V-Half and V-Min.

The actions of one micro-batch are a block: when each stage runs its forward, its backward, and its
gradients of weights. The same block follows for each further micro-batch, as many cycles later as
a worker has actions in it. A worker holds a micro-batch from a stage's forward to the gradients
of its weights. So how long that is in the block says how much memory the schedule needs.

Stages go down the devices and back, as the letter V. The first device holds its first stage longest
and its last stage shortest, the last device both for as long: together all hold as much. The slower
forwards and backwards go down, the longer that is, and the less actions wait for one another.

Source: Qi et al., "Pipeline Parallelism with Controllable Memory" (2024).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import product
from operator import itemgetter

from lightning_gpipe.core.schedules.action import Action, Kind, Row

Block = Mapping[tuple[Kind, int], int]  # the start of each action of a worker, by kind and stage

_CYCLES = 6  # of a block: F, B and W of two stages
_BEFORE_WEIGHTS = 4


def v_half_rows(m: int, placement: Sequence[int], recomputed: Sequence[int]) -> tuple[Row, ...]:
    """Hold the activations of about half as many micro-batches as 1F1B, at most d / 2 + 1 of d."""
    return _rows(m, placement, recomputed, step=2)


def v_min_rows(m: int, placement: Sequence[int], recomputed: Sequence[int]) -> tuple[Row, ...]:
    """Hold the activations of about a third as many micro-batches as 1F1B, for longer waits."""
    return _rows(m, placement, recomputed, step=1)


def _rows(
    m: int, placement: Sequence[int], recomputed: Sequence[int], step: int
) -> tuple[Row, ...]:
    workers = 1 + max(placement)
    waits = _waits(workers, step)
    blocks = (_block(w, workers, step, waits) for w in range(workers))
    return tuple(tuple(_row(block, m, recomputed)) for block in blocks if block is not None)


def _row(block: Block, m: int, recomputed: Sequence[int]) -> Iterator[Action]:
    """Yield the actions of a worker, in order."""
    starts = (
        (start + _CYCLES * i, Action(kind, i, j))
        for (kind, j), start in block.items()
        for i in range(m)
    )
    for _, action in sorted(starts, key=itemgetter(0)):
        if action.kind is Kind.BACKWARD and action.i < recomputed[action.j]:
            yield action._replace(kind=Kind.RECOMPUTE)
        yield action


def _block(w: int, workers: int, step: int, waits: Sequence[int]) -> Block | None:
    """Return when worker ``w`` runs what it does for the first micro-batch.

    Args:
        w: The worker.
        workers: The number of workers.
        step: The cycles from one stage to the next where forwards go down, or backwards do.
        waits: The cycles for which a micro-batch waits at the last worker, at the first, and at the
            last again.

    Returns:
        The starts; None if two actions of different micro-batches would run at the same time.
    """
    down, back = w, 2 * workers - 1 - w
    turn = (step + 1) * (workers - 1) + 1  # when the first worker has the micro-batch again
    forwards_back = turn + waits[0]
    backwards_down = forwards_back + 1 + waits[1]
    backwards_back = backwards_down + turn + waits[2]
    starts = {
        (Kind.FORWARD, down): step * w,
        (Kind.FORWARD, back): forwards_back - w,
        (Kind.BACKWARD, back): backwards_down + step * w,
        (Kind.BACKWARD, down): backwards_back - w,
    }
    taken = {start % _CYCLES for start in starts.values()}
    if len(taken) < _BEFORE_WEIGHTS:
        return None
    for j in (back, down):
        after = starts[Kind.BACKWARD, j] + 1
        start = next(t for t in range(after, after + _CYCLES) if t % _CYCLES not in taken)
        taken.add(start % _CYCLES)
        starts[Kind.WEIGHTS, j] = start
    return starts


@lru_cache
def _waits(workers: int, step: int) -> Sequence[int]:
    """Return the waits with which a worker holds the fewest micro-batches, the shortest ones."""
    # Blocks of workers repeat, but for a shift, as the cycles do.
    some = range(min(workers, _CYCLES))
    found = []
    for waits in product(range(_CYCLES), repeat=3):
        blocks = [_block(w, workers, step, waits) for w in some]
        held = [_held(block) for block in blocks if block is not None]
        if len(held) == len(blocks):
            found.append((max(held), sum(waits), waits))
    return min(found)[2]


def _held(block: Block) -> int:
    """Return the number of activations of micro-batches that a worker holds at once, of a stage."""
    return sum(
        -((start - block[Kind.WEIGHTS, j] - 1) // _CYCLES)
        for (kind, j), start in block.items()
        if kind is Kind.FORWARD
    )
