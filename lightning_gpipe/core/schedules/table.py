"""The table of schedules: all that the rest of the package asks of each.

A new one is a function of the rows of its workers, an entry in ``SCHEDULES`` and a name in
``ScheduleName``. A block of a user has an entry too, which :func:`definition_of` makes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Literal, NamedTuple, TypeGuard, get_args

from lightning_gpipe.core.schedules.action import Kind, Row
from lightning_gpipe.core.schedules.caller_row import with_caller
from lightning_gpipe.core.schedules.patterns import (
    Pattern,
    check_one_forward_one_backward,
    check_zero_bubble,
    fill_drain_patterns,
    one_forward_one_backward_patterns,
    zero_bubble_patterns,
)
from lightning_gpipe.core.schedules.placement import check_folded, folded, looped
from lightning_gpipe.core.schedules.schedule import Schedule
from lightning_gpipe.core.schedules.schedule_blocks import (
    Block,
    block_rows,
    check_block,
    check_order,
    has_weights,
)
from lightning_gpipe.core.schedules.v_shaped import v_half, v_min
from lightning_gpipe.core.schedules.zero_bubble_v import zero_bubble_v_rows

# Literals, for the types of arguments; a test compares them with the table.
ScheduleName = Literal["fill_drain", "1f1b", "zero_bubble", "zero_bubble_v", "v_half", "v_min"]
ByMicroBatch = Literal["1f1b", "zero_bubble", "zero_bubble_v", "v_half", "v_min"]

AnySchedule = ScheduleName | Block  # the user's, by its name or written out


@dataclass(frozen=True)
class ScheduleDefinition:
    """An entry of the table."""

    # The row of each worker, by the number of micro-batches and the worker of each stage: in brief,
    # or else as a block, by the number of workers; or else one by one, by what stages recompute.
    patterns: Callable[[int, Sequence[int]], Sequence[Pattern]] | None = None
    block: Callable[[int], Block] | None = None
    rows: Callable[[int, Sequence[int], Sequence[int]], tuple[Row, ...]] | None = None
    check: Callable[[int, Sequence[int]], None] = lambda m, placement: None  # raises ValueError
    folded: bool = False  # whether stages go down the devices and back, two on each
    by_micro_batch: bool = True  # whether each micro-batch has a loss of its own
    always_split: bool = False  # whether backwards are split, whatever is asked for
    in_groups: bool = False  # whether interleaved stages need whole groups of micro-batches


# The simplest first: it is planned where others are as fast.
SCHEDULES: Mapping[str, ScheduleDefinition] = {
    "fill_drain": ScheduleDefinition(fill_drain_patterns, by_micro_batch=False),
    "1f1b": ScheduleDefinition(
        one_forward_one_backward_patterns, check=check_one_forward_one_backward, in_groups=True
    ),
    "zero_bubble": ScheduleDefinition(
        zero_bubble_patterns, check=check_zero_bubble, always_split=True
    ),
    "zero_bubble_v": ScheduleDefinition(
        rows=zero_bubble_v_rows,
        check=partial(check_folded, "zero_bubble_v"),
        folded=True,
        always_split=True,
    ),
    **{
        name: ScheduleDefinition(
            block=block, check=partial(check_folded, name), folded=True, always_split=True
        )
        for name, block in (("v_half", v_half), ("v_min", v_min))
    },
}


def definition_of(schedule: AnySchedule) -> ScheduleDefinition:
    """Return the entry of a name, or of a block, whose placement :func:`is_folded` tells."""
    if isinstance(schedule, str):
        return SCHEDULES[schedule]
    return ScheduleDefinition(
        block=lambda workers: schedule,
        check=partial(check_block, schedule),
        always_split=has_weights(schedule),
    )


def is_folded(schedule: AnySchedule, workers: int) -> bool:
    """Return True if the stages go down the devices and back, two on each, as a block's may."""
    if isinstance(schedule, str):
        return SCHEDULES[schedule].folded
    return len(schedule) == 2 * workers


def is_possible(schedule: AnySchedule, m: int, stages: int, workers: int) -> bool:
    """Return True if a schedule allows this number of stages, equally many on each worker."""
    place = folded if is_folded(schedule, workers) else looped
    try:
        definition_of(schedule).check(m, place(stages, workers))
    except ValueError:
        return False
    return True


def is_by_micro_batch(schedule: str | Block) -> TypeGuard[ByMicroBatch | Block]:
    """Return True for a schedule in which each micro-batch has a loss of its own."""
    if isinstance(schedule, str):
        return schedule in SCHEDULES and SCHEDULES[schedule].by_micro_batch
    return True


@lru_cache(maxsize=256)
def schedule_for(
    schedule: AnySchedule,
    m: int,
    placement: tuple[int, ...],
    *,
    recomputed: int | tuple[int, ...] = 0,
    split: bool = False,
    starts: tuple[int, ...] = (0,),
) -> Schedule:
    """Return the schedule of ``m`` micro-batches, of which each stage recomputes the first ones.

    ``starts`` are the first stages of the modules in a chain, between which the caller's code runs.
    """
    definition = definition_of(schedule)
    if isinstance(recomputed, int):
        recomputed = (recomputed,) * len(placement)
    rows: tuple[Row, ...]
    split = split or definition.always_split
    if definition.patterns is not None:
        patterns = definition.patterns(m, placement)
        rows = tuple(tuple(pattern.actions(recomputed, split=split)) for pattern in patterns)
    elif definition.block is not None:
        block = definition.block(1 + max(placement))
        rows = block_rows(block, m, placement, recomputed, split=split)
    else:
        assert definition.rows is not None, "an entry has patterns, a block or rows"
        rows = definition.rows(m, placement, recomputed)
    if definition.by_micro_batch:
        return with_caller(Schedule(m, placement, (rows,)), starts)
    fill, drain = (
        tuple(tuple(a for a in row if (a.kind is Kind.FORWARD) == forward) for row in rows)
        for forward in (True, False)
    )
    return Schedule(m, placement, (fill, drain))


fill_drain = partial(schedule_for, "fill_drain")  # of a mini-batch with one loss


class ScheduleKind(NamedTuple):
    """A schedule, by its name or as a block, and whether its backwards are split."""

    schedule: AnySchedule = "fill_drain"
    split: bool = False

    @classmethod
    def of(cls, schedule: AnySchedule, *, split: bool) -> ScheduleKind:
        """Return the kind of the user's arguments; some schedules are always split."""
        return cls(schedule, split or definition_of(schedule).always_split)

    @property
    def definition(self) -> ScheduleDefinition:
        return definition_of(self.schedule)

    @property
    def by_micro_batch(self) -> bool:
        return self.definition.by_micro_batch

    @property
    def arguments(self) -> str:
        named = [f"schedule={self.schedule!r}"] if self.by_micro_batch else []
        if self.split and not self.definition.always_split:
            named.append("split_backward=True")
        return ", ".join(named)

    def __str__(self) -> str:
        return self.arguments or "schedule='fill_drain'"

    def build(
        self, m: int, placement: tuple[int, ...], recomputed: int | tuple[int, ...] = 0
    ) -> Schedule:
        return schedule_for(self.schedule, m, placement, recomputed=recomputed, split=self.split)

    def placement(self, stages: int, devices: int) -> tuple[int, ...]:
        if self.definition.folded:
            return folded(stages, stages // 2)
        return looped(stages, min(stages, devices))

    def possible(self, m: int, placement: Sequence[int]) -> bool:
        try:
            self.definition.check(m, placement)
        except ValueError:
            return False
        return True

    def group(self, stages: int, workers: int) -> int:
        """Return the number of which the number of micro-batches must be a multiple."""
        return workers if self.definition.in_groups and workers < stages else 1


FILL_DRAIN = ScheduleKind()


def _kinds(name: ScheduleName) -> tuple[ScheduleKind, ...]:
    split = (True,) if SCHEDULES[name].always_split else (False, True)
    return tuple(ScheduleKind(name, each) for each in split)


# The kinds among which a plan chooses if none is asked for.
KINDS = tuple(
    kind
    for name in get_args(ScheduleName)
    if SCHEDULES[name].patterns is not None
    for kind in _kinds(name)
)


def check_schedule(schedule: str | Block) -> None:
    """Refuse a name that is not in the table, or a block that no placement has."""
    if not isinstance(schedule, str):
        check_order(schedule)
    elif schedule not in (*SCHEDULES, "auto"):
        choices = ", ".join(map(repr, SCHEDULES))
        raise ValueError(f"schedule must be one of {choices}, or 'auto': got {schedule!r}.")


def check_by_micro_batch(schedule: str | Block, chunks: int, placement: tuple[int, ...]) -> None:
    """Refuse a schedule with one loss for the mini-batch, or that the pipeline cannot run."""
    if not is_by_micro_batch(schedule):
        choices = ", ".join(map(repr, get_args(ByMicroBatch)))
        raise ValueError(f"schedule must be one of {choices}: got {schedule!r}.")
    definition_of(schedule).check(chunks, placement)


def check_planned(schedule: AnySchedule | Literal["auto"]) -> None:
    """Refuse a block, which is no schedule for other numbers."""
    if not isinstance(schedule, str):
        raise ValueError(
            f"schedule={schedule!r} is not planned: got something that is 'auto', or a plan of it. "
            "Write numbers, or schedule='auto', which finds a block for them."
        )


def kinds_for(
    schedule: ScheduleName | Literal["auto"], split: bool | None
) -> tuple[ScheduleKind, ...]:
    """Return the kinds that ``"auto"``, or a ``split`` of None, leaves to choose from."""
    check_planned(schedule)
    return tuple(
        kind
        for kind in (KINDS if schedule == "auto" else _kinds(schedule))
        if split is None or kind.split == split or kind.definition.always_split
    )
