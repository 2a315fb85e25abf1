"""Why workers were idle: the idle share of a real run, cause by cause.

A timeline shows that a worker was idle, not why: the micro-batch that it waited for may be late by
the schedule, because the previous stage is slow, or because a thread waited for the interpreter. So
the schedule is simulated several times, each time with one more cause, and the idle share that a
simulation adds to the one before is the part of that cause:

=====================================================  ==============
a replay in which an action takes                      adds the part
=====================================================  ==============
what its kind computes on average, on all stages       schedule
what its kind computes on average on its stage         imbalance
what it computed itself                                variation
that, and what it was queued for a core                queue
all the time from its beginning to its end             lock
the run as it was, which is no replay                  transfers
=====================================================  ==============

So the parts add up to the idle share that was measured. That of ``schedule`` is (n - 1) / (m + n -
1) in fill-drain without recomputation. A part has its effects in it: if one worker waits for the
lock, and others for that worker, all of it is the lock's. It can be negative for a worker whom the
cause leaves less time to be idle, as imbalance does the slowest.

Time counts from the first action of a phase, forward or backward, to the last. A worker is busy
while its thread computes within an action, and idle otherwise. So waiting *within* an action is
idle time here, while the timeline counts it as busy. With one intra-op thread there is little to
wait for but a core, for which the kernel keeps the waiting time, and the interpreter lock. If
workers take turns, the two go together: a thread that gets the lock is queued for the core of the
one that released it. ``transfers`` is everything between actions: sending and receiving, waking up,
bookkeeping, and waiting for the lock there.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from lightning_gpipe.core.run.observe.timeline import Timeline
from lightning_gpipe.core.schedules import Action, Schedule, Span

Costs = Mapping[Action, float]


class Row(NamedTuple):
    """What became of one worker's time, in shares of it.

    The first is the sum of the six parts. The last two say where it was felt, not why: waiting
    within its own actions, and not beginning one although all that it needs had ended.
    """

    idle: float
    schedule: float
    imbalance: float
    variation: float
    queue: float
    lock: float
    transfers: float
    within: float
    between: float


PARTS = Row._fields[1:7]


@dataclass(frozen=True)
class Audit:
    """The idle time of one run, or of several on average.

    Attributes:
        seconds: How long both halves took.
        rows: One per worker.
    """

    seconds: float
    rows: tuple[Row, ...]

    @property
    def all(self) -> Row:
        """The workers on average."""
        return _mean(self.rows)


def audit(timeline: Timeline, computing: Costs, queued: Costs | None = None) -> Audit:
    """Split the idle time of a mini-batch, each phase by itself and then all, by their lengths.

    Args:
        timeline: What ran when.
        computing: How many seconds of each action its thread computed.
        queued: For how many it was ready to and had no core; none by default.
    """
    whole, spans = timeline.schedule, timeline.spans
    phases = []
    for schedule in map(whole.phase, range(len(whole.phases))):
        actions = {action for row in schedule.rows for action in row}
        ran = {span.action: span for span in spans if span.action in actions}
        if ran:
            phases.append(_phase(schedule, ran, computing, queued or {}))
    lengths = [each.seconds for each in phases]
    rows = zip(*(each.rows for each in phases), strict=True)
    return Audit(sum(lengths), tuple(_mean(each, lengths) for each in rows))


def typical(audits: Sequence[Audit]) -> Audit:
    """The mean of the middle half, by how long they took: parts still add up, as medians do not."""
    ordered = sorted(audits, key=lambda each: each.seconds)
    margin = len(ordered) // 4
    middle = ordered[margin : len(ordered) - margin]
    rows = zip(*(each.rows for each in middle), strict=True)
    return Audit(statistics.fmean(each.seconds for each in middle), tuple(map(_mean, rows)))


def _phase(
    schedule: Schedule, spans: Mapping[Action, Span], computing: Costs, queued: Costs
) -> Audit:
    """The audit of one phase, all of whose actions ran."""
    length = max(s.end for s in spans.values()) - min(s.start for s in spans.values())
    taken = {a: spans[a].end - spans[a].start for row in schedule.rows for a in row}
    own = {a: min(computing[a], taken[a]) for a in taken}
    with_queue = {a: min(own[a] + queued.get(a, 0.0), taken[a]) for a in taken}
    by_kind = _averages(own, lambda action: action.kind)
    by_stage = _averages(own, lambda action: (action.kind, action.j))

    replays = [
        _idle(schedule, by_kind, by_kind),
        _idle(schedule, by_stage, by_stage),
        _idle(schedule, own, own),
        _idle(schedule, own, with_queue),
        _idle(schedule, own, taken),
        [1.0 - sum(own[a] for a in row) / length for row in schedule.rows],
    ]
    rows = []
    for w, row in enumerate(schedule.rows):
        shares = [0.0, *(idle[w] for idle in replays)]
        parts = [after - before for before, after in pairwise(shares)]
        within = sum(taken[a] - own[a] for a in row)
        late = _late(schedule, w, spans)
        rows.append(Row(*[shares[-1], *parts, within / length, late / length]))
    return Audit(length, tuple(rows))


def _idle(schedule: Schedule, busy: Costs, cost: Costs) -> list[float]:
    """The idle share of each worker in a replay; it is busy for a part of what actions take."""
    makespan = schedule.simulate(cost.__getitem__).makespan
    return [1.0 - sum(busy[a] for a in row) / makespan for row in schedule.rows]


def _averages(costs: Costs, group: Callable[[Action], object]) -> dict[Action, float]:
    """What the actions of its group cost on average, for each action."""
    groups: dict[object, list[float]] = {}
    for action, cost in costs.items():
        groups.setdefault(group(action), []).append(cost)
    return {action: statistics.fmean(groups[group(action)]) for action in costs}


def _late(schedule: Schedule, worker: int, spans: Mapping[Action, Span]) -> float:
    """How long a worker could have begun an action, all in all, and had not."""
    late, free = 0.0, min(span.start for span in spans.values())
    for action in schedule.rows[worker]:
        needed = [spans[a].end for a in schedule.needs(action) if a in spans]
        late += spans[action].start - max([free, *needed])
        free = spans[action].end
    return late


def _mean(rows: Iterable[Row], weights: Sequence[float] | None = None) -> Row:
    return Row(*(statistics.fmean(each, weights) for each in zip(*rows, strict=True)))
