"""What other settings would bring, by the times that actions were measured to take.

The simulator runs the schedule of other settings with the measured times. What a setting does to an
action is known in part: an action on half of the rows takes half as long at best. So some gains are
upper bounds, and say so. Where the simulator does not explain how long the present settings take,
it cannot tell about others: that is to be asked first, see :func:`doubts`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from lightning_gpipe.core.plan.action import Action, Kind
from lightning_gpipe.core.plan.balance.shift import Shift
from lightning_gpipe.core.plan.by_micro_batch import remade
from lightning_gpipe.core.plan.orders import ORDERS, Order
from lightning_gpipe.core.plan.schedule import Schedule

Times = Mapping[tuple[Kind, int], float]

_FIXED = 1e-4  # seconds of an action that do not become fewer with its rows: the engine's, at least
_STEP = 4e-4  # seconds of the caller for a micro-batch that has a loss of its own, at least
_LAG = 1.25  # from there on actions wait more than they can be said to compute
_NEAR = 0.1  # by so much a prediction may be wrong


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


def doubts(
    schedule: Schedule, times: Times, length: float, *, lag: float = 1.0, inline: bool = False
) -> str:
    """Why gains by simulation are not known; empty if they are.

    Args:
        schedule: What ran.
        times: The mean time of an action of each kind, on each stage and of the caller.
        length: The time of a mini-batch, as it was measured.
        lag: How many times as long actions took as their threads computed.
        inline: Whether one thread ran all stages.
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
    parts: Sequence[tuple[float, float]] | None = None,
    steps: bool = False,
    inline: bool = False,
) -> list[Change]:
    """What other settings would bring, the best first.

    Args:
        schedule: What ran.
        times: The mean time of an action of each kind, on each stage and of the caller.
        busy: The time in which each stage was at work.
        costs: Finds the best balance by these times, if the layers were measured.
        parts: For each stage what both parts of a backward that is split take, relative to a whole
            one, if that was measured.
        steps: Whether each micro-batch may have a loss of its own.
        inline: Whether one thread ran all stages, so that only less work takes less time.
    """
    m, recomputed = schedule.m, len(schedule.recomputed(0))
    now = _length(schedule, times, inline=inline)

    def gain(other: Schedule, measured: Times) -> float:
        return 1 - _length(other, measured, inline=inline) / now if now else 0.0

    kept = remade(schedule, m, recomputed=0)
    found = [
        Change(
            "activation_checkpointing='never'",
            gain(kept, _keeping(times)),
            if_="the memory suffices",
        )
    ]
    if inline:
        return found
    if costs is None:
        even = _scaled(times, [fmean(busy) / each if each else 1.0 for each in busy])
        balance = Change("balance='time'", gain(schedule, even), at_most=True)
    else:
        shift = costs(busy)
        pairs = zip(shift.stages, busy, strict=True)
        shares = [after / each if each else 1.0 for after, each in pairs]
        balance = Change(f"balance={list(shift.after)}", gain(schedule, _scaled(times, shares)))
    halves = {key: max(each / 2, min(each, _FIXED)) for key, each in times.items()}
    twice = remade(schedule, 2 * m, recomputed=2 * recomputed)
    rows = "a batch has enough rows"
    found += [balance, Change(f"chunks={2 * m}", gain(twice, halves), at_most=True, if_=rows)]
    for order in _others(schedule, steps=steps):
        own_loss = order.by_micro_batch and not schedule.caller
        # Few micro-batches are alive then, so that none need be recomputed.
        other = order.made(m, schedule.placement, 0 if own_loss else recomputed)
        divided = order.split and not schedule.split
        measured = _in_parts(times, parts) if divided else times
        if own_loss:
            measured = _with_losses(_keeping(measured), other)
        if_ = "training_step may be called for each micro-batch" if own_loss else ""
        at_most = own_loss or (divided and parts is None)
        found.append(Change(order.written, gain(other, measured), at_most=at_most, if_=if_))
    return sorted(found, key=lambda change: -change.gain)


def _others(schedule: Schedule, *, steps: bool) -> Iterator[Order]:
    """The orders to which a schedule could be changed, and whose times are known."""
    m, placement, recomputed = schedule.m, schedule.placement, len(schedule.recomputed(0))
    for order in ORDERS:
        # The loss of a batch may be another one, and what a whole backward takes is not known.
        if order.by_micro_batch < bool(schedule.caller) or order.split < schedule.split:
            continue
        if order.by_micro_batch and not (steps or schedule.caller):
            continue
        if order.possible(m, placement) and order.made(m, placement, recomputed) != schedule:
            yield order


def _in_parts(times: Times, parts: Sequence[tuple[float, float]] | None) -> Times:
    """The times where backwards are split: as measured, or at best, in halves.

    Nobody waits for the backward of the first stage, which is not known to be split.
    """
    found = dict(times)
    for (kind, j), time in times.items():
        if kind is Kind.BACKWARD and j >= 0:
            of_inputs, of_weights = parts[j] if parts else ((0.5, 0.5) if j else (1.0, 0.0))
            found[kind, j], found[Kind.WEIGHTS, j] = of_inputs * time, of_weights * time
    return found


def _keeping(times: Times) -> Times:
    """The times where no micro-batch is recomputed: a forward keeps activations, as that does."""
    found = dict(times)
    for (kind, j), time in times.items():
        if kind is Kind.FORWARD:
            found[kind, j] = max(time, times.get((Kind.RECOMPUTE, j), 0.0))
    return found


def _with_losses(times: Times, schedule: Schedule) -> Times:
    """The times with what the caller does at least, where each micro-batch has a loss."""
    return {(action.kind, action.j): _STEP / 2 for action in schedule.caller} | dict(times)


def _length(schedule: Schedule, times: Times, *, inline: bool = False) -> float:
    """The time of a mini-batch: by the simulator or, on one thread, the sum of all actions."""

    def cost(action: Action) -> float:
        return times.get((action.kind, action.j), 0.0)

    if inline:
        return sum(cost(action) for row in (*schedule.rows, schedule.caller) for action in row)
    return schedule.simulate(cost).makespan


def _scaled(times: Times, shares: Sequence[float]) -> Times:
    """The times on stages of which each takes this share of what it took; the caller's stay."""
    return {
        (kind, j): time if Action(kind, 0, j).by_caller else time * shares[j]
        for (kind, j), time in times.items()
    }
