"""The schedules by the names that users write, with backwards at once or in two parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

from lightning_gpipe.core.plan.by_micro_batch import by_micro_batch
from lightning_gpipe.core.plan.fill_drain import fill_drain, fill_drain_patterns
from lightning_gpipe.core.plan.interleaved import interleaved_patterns
from lightning_gpipe.core.plan.layout import looped
from lightning_gpipe.core.plan.one_forward_one_backward import one_forward_one_backward_patterns
from lightning_gpipe.core.plan.rows import Pattern
from lightning_gpipe.core.plan.schedule import Schedule
from lightning_gpipe.core.plan.zero_bubble import zero_bubble_patterns

ScheduleName = Literal["fill_drain", "1f1b", "zero_bubble", "zero_bubble_v"]
ALWAYS_SPLIT = ("zero_bubble", "zero_bubble_v")


class Order(NamedTuple):
    """In which order the actions of a mini-batch run.

    Attributes:
        schedule: The schedule.
        split: Whether the gradients of the weights are an action of their own; they always are in
            ``"zero_bubble"`` and ``"zero_bubble_v"``.
    """

    schedule: ScheduleName = "fill_drain"
    split: bool = False

    @property
    def by_micro_batch(self) -> bool:
        """Whether each micro-batch has a loss of its own."""
        return self.schedule != "fill_drain"

    @property
    def written(self) -> str:
        """The arguments that ask for it."""
        if self.schedule in ALWAYS_SPLIT:
            return f"schedule={self.schedule!r}"
        named = [f"schedule={self.schedule!r}"] if self.by_micro_batch else []
        return ", ".join([*named, *(["split_backward=True"] if self.split else [])])

    def __str__(self) -> str:
        return self.written or "schedule='fill_drain'"

    def patterns(self, m: int, placement: Sequence[int], recomputed: int = 0) -> list[Pattern]:
        """The row of each worker in brief.

        Args:
            m: The number of micro-batches.
            placement: The worker of each stage; that of stage j is j mod the number of workers.
            recomputed: An integer k: the first k micro-batches drop their activations.

        Raises:
            ValueError: If m makes no whole groups for interleaved stages, or the schedule has no
                patterns.
        """
        if self.schedule == "zero_bubble_v":
            raise ValueError(
                "schedule='zero_bubble_v' is a table without patterns: got patterns()."
            )
        n, workers = len(placement), 1 + max(placement)
        if self.schedule == "fill_drain":
            return fill_drain_patterns(m, placement, recomputed=recomputed, split=self.split)
        if self.schedule == "zero_bubble":
            return zero_bubble_patterns(m, n, recomputed=recomputed)
        if workers == n:
            return one_forward_one_backward_patterns(m, n, recomputed=recomputed, split=self.split)
        return interleaved_patterns(m, n, workers, recomputed=recomputed, split=self.split)

    def made(self, m: int, placement: tuple[int, ...], recomputed: int = 0) -> Schedule:
        """What the engine runs; arguments as for :meth:`patterns`."""
        if self.schedule == "fill_drain":
            return fill_drain(m, placement, recomputed=recomputed, split=self.split)
        return by_micro_batch(self.schedule, m, placement, recomputed=recomputed, split=self.split)

    def possible(self, m: int, placement: Sequence[int]) -> bool:
        """Whether there is such a schedule for the stages of a placement."""
        workers = 1 + max(placement)
        if self.schedule == "zero_bubble_v":
            return tuple(placement) == (*range(workers), *reversed(range(workers)))
        in_loops = tuple(placement) == looped(len(placement), workers)
        if self.schedule == "fill_drain" or workers == len(placement):
            return True
        return in_loops and self.schedule == "1f1b" and m % workers == 0


FILL_DRAIN = Order()

# The simplest first: it is chosen where others are as fast.
ORDERS = (
    FILL_DRAIN,
    Order(split=True),
    Order("1f1b"),
    Order("1f1b", split=True),
    Order("zero_bubble", split=True),
)


def check_schedule_name(name: str) -> None:
    """Refuse a schedule that there is not.

    Raises:
        ValueError: Says which there are.
    """
    if name not in (*get_args(ScheduleName), "auto"):
        choices = ", ".join(map(repr, get_args(ScheduleName)))
        raise ValueError(f"schedule must be one of {choices}, or 'auto': got {name!r}.")


def check_planned(schedule: ScheduleName | Literal["auto"]) -> None:
    """Refuse a schedule that is not planned.

    Raises:
        ValueError: If it is.
    """
    if schedule not in ("auto", *(order.schedule for order in ORDERS)):
        raise ValueError(
            f"schedule={schedule!r} is not planned: got something that is 'auto', or a plan of it. "
            "Write numbers, or schedule='zero_bubble'."
        )


def orders_for(schedule: ScheduleName | Literal["auto"], split: bool | None) -> tuple[Order, ...]:
    """The orders that a schedule and the splitting of backwards leave to choose from.

    Args:
        schedule: The schedule; ``"auto"`` leaves all.
        split: Whether backwards are split, in schedules that do not always; None leaves both.

    Raises:
        ValueError: If the schedule is not planned.
    """
    check_planned(schedule)
    return tuple(
        order
        for order in ORDERS
        if schedule in ("auto", order.schedule)
        and (split is None or order.split == split or order.schedule in ALWAYS_SPLIT)
    )
