"""What other settings would bring, by the times that actions were measured to take.

The simulator runs the schedule of other settings with the measured times. What a setting does to an
action is known in part: an action on half of the rows takes half as long at best. So some gains are
upper bounds, and say so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from lightning_gpipe.core.plan.action import Action, Kind
from lightning_gpipe.core.plan.balance.shift import Shift
from lightning_gpipe.core.plan.by_micro_batch import remade
from lightning_gpipe.core.plan.schedule import Schedule

Times = Mapping[tuple[Kind, int], float]


@dataclass(frozen=True)
class Change:
    """Another setting.

    Attributes:
        setting: As the user would write it.
        gain: The share by which the time of a mini-batch gets shorter.
        at_most: Whether it may bring less.
        if_: What it needs; empty if nothing.
    """

    setting: str
    gain: float
    at_most: bool = False
    if_: str = ""

    def __str__(self) -> str:
        bound = "up to " if self.at_most else ""
        return f"{self.setting} would bring {bound}{self.gain:.0%}" + (
            f", if {self.if_}" if self.if_ else ""
        )


def changes(
    schedule: Schedule,
    times: Times,
    busy: Sequence[float],
    costs: Callable[[Sequence[float]], Shift] | None = None,
) -> list[Change]:
    """What other settings would bring, the best first.

    Args:
        schedule: What ran.
        times: The mean time of an action of each kind, on each stage and of the caller.
        busy: The time in which each stage was at work.
        costs: Finds the best balance by these times, if the layers were measured.
    """
    m, recomputed = schedule.m, len(schedule.recomputed(0))
    now = _length(schedule, times)

    def gain(other: Schedule, measured: Times) -> float:
        return 1 - _length(other, measured) / now if now else 0.0

    if costs is None:
        even = _scaled(times, [fmean(busy) / each if each else 1.0 for each in busy])
        balance = Change("balance='time'", gain(schedule, even), at_most=True)
    else:
        shift = costs(busy)
        pairs = zip(shift.stages, busy, strict=True)
        shares = [after / each if each else 1.0 for after, each in pairs]
        balance = Change(f"balance={list(shift.after)}", gain(schedule, _scaled(times, shares)))
    halves = {key: each / 2 for key, each in times.items()}
    twice = remade(schedule, 2 * m, recomputed=2 * recomputed)
    kept = remade(schedule, m, recomputed=0)
    rows, memory = "a batch has enough rows", "the memory suffices"
    found = [
        balance,
        Change(f"chunks={2 * m}", gain(twice, halves), at_most=True, if_=rows),
        Change("activation_checkpointing='never'", gain(kept, times), if_=memory),
    ]
    return sorted(found, key=lambda change: -change.gain)


def _length(schedule: Schedule, times: Times) -> float:
    """The time of a mini-batch, by the simulator."""

    def cost(action: Action) -> float:
        return times.get((action.kind, action.j), 0.0)

    return schedule.simulate(cost).makespan


def _scaled(times: Times, shares: Sequence[float]) -> Times:
    """The times on stages of which each takes this share of what it took; the caller's stay."""
    return {
        (kind, j): time if Action(kind, 0, j).by_caller else time * shares[j]
        for (kind, j), time in times.items()
    }
