"""Advice: the gains of other settings, by the measured times of actions.

The simulator runs the schedule with other settings and the measured times. Other schedules are
compared by a plan, which measures what they need and knows the memory. An action on half of the
rows takes half as long at best, so some gains are upper bounds. If the simulator does not explain
the time of the present settings, it says nothing about others: ask :func:`doubts` first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from lightning_gpipe.core.balance import Shift
from lightning_gpipe.core.schedules import Action, Kind, Schedule, ScheduleKind

Times = Mapping[tuple[Kind, int], float]

_FIXED = 1e-4  # seconds of an action that do not shrink with its rows: the engine's, at least
_LAG = 1.25  # above it actions wait too long for their times to mean computation
_NEAR = 0.1  # the relative error that a prediction may have


@dataclass(frozen=True)
class Change:
    """Another setting, as the user would write it, and its gain.

    ``gain`` is the share by which the time of a mini-batch gets shorter, or its upper bound
    (``at_most``); ``if_`` its condition.
    """

    setting: str
    gain: float
    at_most: bool = False
    if_: str = ""

    def __str__(self) -> str:
        bound = "up to " if self.at_most else ""
        condition = f", if {self.if_}" if self.if_ else ""
        return f"{self.setting} would bring {bound}{self.gain:.0%}{condition}"


def doubts(
    schedule: Schedule, times: Times, length: float, *, lag: float = 1.0, inline: bool = False
) -> str:
    """Return why the simulation cannot predict gains; empty if it can.

    ``length`` is the measured time of a mini-batch, ``lag`` the time of actions divided by the CPU
    time of their threads. For the others see :func:`changes`.
    """
    if lag > _LAG:
        return (
            f"its actions took {lag:.1f} times as long as their threads computed: they wait for "
            "cores, or for the interpreter's lock"
        )
    predicted = _length(schedule, times, inline=inline)
    if abs(predicted - length) > _NEAR * length:
        return f"its actions explain {1e3 * predicted:,.1f} of {1e3 * length:,.1f} ms"
    return ""


def changes(
    schedule: Schedule,
    times: Times,
    busy: Sequence[float],
    costs: Callable[[Sequence[float]], Shift] | None = None,
    *,
    inline: bool = False,
) -> list[Change]:
    """Return the gains of other settings, the largest first.

    Args:
        times: The mean time of an action of each kind, on each stage and of the caller.
        busy: The time in which each stage was at work.
        costs: Finds the best balance by these times, if the layers were measured.
        inline: Whether one thread ran all stages, so that only less work takes less time.
    """
    m, placement, recomputed = schedule.m, schedule.placement, schedule.numbers_recomputed
    kind = ScheduleKind(*schedule.kind)
    now = _length(schedule, times, inline=inline)

    def gain(other: Schedule, measured: Times) -> float:
        return 1 - _length(other, measured, inline=inline) / now if now else 0.0

    keeping = gain(kind.build(m, placement), _keeping(times))
    gains = [Change("activation_checkpointing='never'", keeping, if_="the memory suffices")]
    if inline:
        return gains
    if costs is None:
        even = _scaled(times, [fmean(busy) / time if time else 1.0 for time in busy])
        gains.append(Change("balance='time'", gain(schedule, even), at_most=True))
    else:
        shift = costs(busy)
        pairs = zip(shift.stages, busy, strict=True)
        shifted = _scaled(times, [after / time if time else 1.0 for after, time in pairs])
        gains.append(Change(f"balance={list(shift.after)}", gain(schedule, shifted)))
    halves = {key: max(time / 2, min(time, _FIXED)) for key, time in times.items()}
    twice = gain(kind.build(2 * m, placement, tuple(2 * k for k in recomputed)), halves)
    gains.append(Change(f"chunks={2 * m}", twice, at_most=True, if_="a batch has enough rows"))
    return sorted(gains, key=lambda change: -change.gain)


def _keeping(times: Times) -> Times:
    """The times without recomputation: forwards keep activations, as recomputations do."""
    return {
        (kind, j): max(time, times.get((Kind.RECOMPUTE, j), 0.0)) if kind is Kind.FORWARD else time
        for (kind, j), time in times.items()
    }


def _length(schedule: Schedule, times: Times, *, inline: bool = False) -> float:
    """The time of a mini-batch: by the simulator or, on one thread, the sum of all actions."""

    def cost(action: Action) -> float:
        return times.get((action.kind, action.j), 0.0)

    if inline:
        return sum(cost(action) for row in (*schedule.rows, schedule.caller) for action in row)
    return schedule.simulate(cost).makespan


def _scaled(times: Times, shares: Sequence[float]) -> Times:
    """The times of each stage, multiplied by its share; those of the caller stay."""
    return {
        (kind, j): time if Action(kind, 0, j).by_caller else time * shares[j]
        for (kind, j), time in times.items()
    }
