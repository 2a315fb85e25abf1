"""Schedules on two stages for each device whose memory is chosen: V-Half and V-Min.

Both are blocks. A worker holds a micro-batch from a stage's forward to the gradients of its
weights, so how long that is in the block says how much memory the schedule needs.

Stages go down the devices and back, as the letter V. The first device holds its first stage longest
and its last stage shortest, the last device both for as long: together all hold as much. The slower
forwards and backwards go down, the longer that is, and the less actions wait for one another.

Source: Qi et al., "Pipeline Parallelism with Controllable Memory" (2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import product

from lightning_gpipe.core.schedules.schedule_blocks import Block

_CYCLES = 6  # of a block: F, B and W of two stages


def v_half(workers: int) -> Block:
    """Return the block that holds about half as many activations as 1F1B: of d, d / 2 + 1."""
    return _block(workers, step=2)


def v_min(workers: int) -> Block:
    """Return the block that holds about a third as many activations as 1F1B, and waits longer."""
    return _block(workers, step=1)


@lru_cache
def _block(workers: int, step: int) -> Block:
    """Return the block with which a worker holds the fewest micro-batches, with the shortest waits.

    ``step`` is the cycles from one stage to the next where forwards go down, or backwards do.
    """
    # The starts of workers repeat, but for a shift, as the cycles do.
    some = range(min(workers, _CYCLES))
    fitting = []
    for waits in product(range(_CYCLES), repeat=3):
        stages = [_stages(w, workers, step, waits) for w in some]
        if all(stages):
            fitting.append((max(map(_held, stages)), sum(waits), waits))
    waits = min(fitting)[2]
    pairs = [_stages(w, workers, step, waits) for w in range(workers)]
    return *(down for down, _ in pairs), *(back for _, back in reversed(pairs))


def _stages(w: int, workers: int, step: int, waits: Sequence[int]) -> Block:
    """Return the starts of both stages of worker ``w``; none if actions would collide.

    ``waits`` are the cycles of a micro-batch at the last worker, the first, and the last again.
    """
    turn = (step + 1) * (workers - 1) + 1  # when the first worker has the micro-batch again
    forwards_back = turn + waits[0]
    backwards_down = forwards_back + 1 + waits[1]
    backwards_back = backwards_down + turn + waits[2]
    down = step * w, backwards_back - w
    back = forwards_back - w, backwards_down + step * w
    occupied = {start % _CYCLES for start in (*down, *back)}
    if len(occupied) < len(down) + len(back):
        return ()
    weights = []
    for _, backward in (back, down):
        after = range(backward + 1, backward + 1 + _CYCLES)
        weights.append(next(start for start in after if start % _CYCLES not in occupied))
        occupied.add(weights[-1] % _CYCLES)
    return (*down, weights[1]), (*back, weights[0])


def _held(stages: Block) -> int:
    """Return the number of activations of micro-batches that a worker holds at once, of a stage."""
    return sum(-((forward - weights - 1) // _CYCLES) for forward, _, weights in stages)
