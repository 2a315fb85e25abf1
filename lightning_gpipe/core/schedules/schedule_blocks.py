"""Schedules that are a block: the actions of one micro-batch, which repeat for each further one.

Rows of workers could be any. But they differ with the number of micro-batches, and they may
deadlock. A block has the start of each action of the first micro-batch, in clock cycles: for each
stage that of F, of B and, where backwards are split, of W. Each further micro-batch follows as many
cycles later as a worker has actions in the block. So 1F1B on four devices is::

    ((0, 7), (1, 6), (2, 5), (3, 4))

    stage 0 | F0 .  F1 .  F2 .  F3 B0 F4 B1
    stage 1 | .  F0 .  F1 .  F2 B0 F3 B1 F4
    stage 2 | .  .  F0 .  F1 B0 F2 B1 F3 B2
    stage 3 | .  .  .  F0 B0 F1 B1 F2 B2 F3

No two actions of a worker have the same start, and each starts after those that it needs. Ordered
by their starts, the actions are a sequence that a single thread can run, so there is no deadlock
for any number of micro-batches. A worker takes only the order: it runs each action as early as it
can.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

from lightning_gpipe.core.schedules.action import Action, Kind, Row, predecessors
from lightning_gpipe.core.schedules.placement import counted

Block = tuple[tuple[int, ...], ...]  # the starts of each stage's F and B, or of its F, B and W

_KINDS = (Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHTS)


def as_block(starts: Sequence[Sequence[int]]) -> Block:
    """Return a block as tuples, which hash; raise if stages have not equally many integers."""
    try:
        block = tuple(map(tuple, starts))
    except TypeError:
        block = ()
    lengths = {len(stage) for stage in block}
    if lengths not in ({2}, {3}) or any(type(start) is not int for each in block for start in each):
        raise ValueError(
            "schedule must be a name, or a block: the starts of F and B on each stage, or of F, B "
            f"and W, as integers: got {starts!r}. Write [[0, 3], [1, 2]] for 1F1B on two devices."
        )
    return block


def starts_of(block: Block) -> dict[Action, int]:
    """Return the starts of the actions of the first micro-batch."""
    return {
        Action(kind, 0, j): start
        for j, stage in enumerate(block)
        for kind, start in zip(_KINDS, stage, strict=False)
    }


def has_weights(block: Block) -> bool:
    """Return True if the gradients of the weights are actions in the block."""
    return len(block[0]) == len(_KINDS)


def cycle_of(block: Block, placement: Sequence[int]) -> int:
    """Return the clock cycles from one micro-batch to the next: the actions of a worker."""
    return len(block[0]) * len(block) // (1 + max(placement))


def block_rows(
    block: Block, m: int, placement: Sequence[int], recomputed: Sequence[int], *, split: bool
) -> tuple[Row, ...]:
    """Return the row of each worker; arguments as for :func:`schedule_for`."""
    cycle = cycle_of(block, placement)
    starts = (
        (start + cycle * i, action._replace(i=i))
        for action, start in starts_of(block).items()
        for i in range(m)
    )
    rows: list[list[Action]] = [[] for _ in range(1 + max(placement))]
    for _, action in sorted(starts, key=itemgetter(0)):
        row, backward = rows[placement[action.j]], action.kind is Kind.BACKWARD
        if backward and action.i < recomputed[action.j]:
            row.append(action._replace(kind=Kind.RECOMPUTE))
        row.append(action)
        if backward and split and not has_weights(block):
            row.append(action._replace(kind=Kind.WEIGHTS))
    return tuple(map(tuple, rows))


def check_block(block: Block, m: int, placement: Sequence[int]) -> None:
    """Refuse a block for other stages, or with actions that wait for one another, for any ``m``."""
    if len(block) != len(placement):
        raise ValueError(
            f"a schedule that is a block must have the starts of each stage: got "
            f"schedule={block!r} of {counted(len(block), 'stage')} for "
            f"{counted(len(placement), 'stage')}. Write another balance, or another block."
        )
    check_order(block)
    _check_slots(block, placement)


def check_order(block: Block) -> None:
    """Refuse a block in which an action does not start after those that it needs."""
    starts = starts_of(block)
    for action, start in starts.items():
        for needed in predecessors(action):
            if start <= starts.get(needed, start - 1):
                raise ValueError(
                    f"an action must start after those that it needs: got schedule={block!r}, "
                    f"where {_named(action)} starts at {start} and {_named(needed)} at "
                    f"{starts[needed]}. Let {_named(action)} start later."
                )


def _check_slots(block: Block, placement: Sequence[int]) -> None:
    cycle = cycle_of(block, placement)
    first: dict[tuple[int, int], Action] = {}
    starts = starts_of(block)
    for action, start in starts.items():
        other = first.setdefault((placement[action.j], start % cycle), action)
        if other != action:
            raise ValueError(
                f"starts on a device must differ by no multiple of {cycle}, as a micro-batch "
                f"follows after {cycle} clock cycles: got schedule={block!r}, where "
                f"{_named(other)} starts at {starts[other]} and {_named(action)} at {start}. Move "
                "one of them."
            )


def _named(action: Action) -> str:
    return f"{action.kind.letter} of stage {action.j}"
