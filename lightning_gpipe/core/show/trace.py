"""Writes timelines in the JSON trace event format, which Perfetto and Chrome open.

Each worker is a thread of the trace, and so is the caller, with another for its row of a schedule.
An action is a complete event ("X"); a transfer is a flow ("s" to "f"): an arrow from the end of the
one action to the begin of the other.

Times are whole microseconds: readers drop an event that partly overlaps another of its thread, and
round fractions in different ways. The numbers of flows are integers: Perfetto reads a string as a
hexadecimal number, and drops other strings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from math import floor
from typing import Any, NamedTuple

from lightning_gpipe.core.layout import Layout
from lightning_gpipe.core.schedules import Action, Kind, Span, predecessors

_PID = 1
_CALLER = 0  # the thread of the caller; that of worker w is w + 1


class Slice(NamedTuple):
    """An activity of the caller, with times in seconds."""

    name: str
    start: float
    end: float


class TracedRun(NamedTuple):
    """The actions of a mini-batch, of all processes."""

    layout: Layout
    spans: Sequence[Span]


def trace_of(
    runs: Iterable[TracedRun], caller: Sequence[Slice] = (), name: str = "GPipe"
) -> dict[str, Any]:
    """Return a trace of mini-batches and the caller's activities, for ``json.dump``."""
    runs = list(runs)
    starts = [span.start for _, spans in runs for span in spans] + [x.start for x in caller]
    begin = min(starts, default=0.0)
    events = [_event("M", "process_name", _CALLER, args={"name": name}), *_threads(runs)]
    for x in caller:
        events.append(_event("X", x.name, _CALLER, cat="caller", **_during(x, begin), args={}))
    numbers = count()
    for layout, spans in runs:
        events += [_action(layout, span, begin) for span in spans]
        events += _flows(layout, spans, begin, numbers)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _threads(runs: Sequence[TracedRun]) -> Iterator[dict[str, Any]]:
    names = {_CALLER: "caller"}
    for layout, _ in runs:
        names |= {w + 1: _worker(layout, w) for w in range(len(layout.devices))}
    for layout, spans in runs:
        row = f"caller, by micro-batch ({layout.outside})"
        names |= {span.worker + 1: row for span in spans if span.action.by_caller}
    for thread, name in sorted(names.items()):
        yield _event("M", "thread_name", thread, args={"name": name})
        yield _event("M", "thread_sort_index", thread, args={"sort_index": thread})


def _worker(layout: Layout, w: int) -> str:
    stages = layout.stages_of(w)
    numbers = ", ".join(map(str, stages))
    return f"worker {w} ({layout.devices[w]}), stage{'s' if len(stages) > 1 else ''} {numbers}"


def _event(phase: str, name: str, thread: int, **fields: Any) -> dict[str, Any]:
    return {"ph": phase, "name": name, "pid": _PID, "tid": thread, **fields}


def _during(activity: Slice | Span, begin: float) -> dict[str, int]:
    start, end = _micro(activity.start - begin), _micro(activity.end - begin)
    return {"ts": start, "dur": end - start}


def _action(layout: Layout, span: Span, begin: float) -> dict[str, Any]:
    kind, i, j = span.action
    args: dict[str, Any] = {"micro-batch": i}
    if not span.action.by_caller:
        args |= {"stage": j, "runs": str(layout.partitions[j])}
    name, times = f"{kind.verb} {i}", _during(span, begin)
    return _event("X", name, span.worker + 1, cat=kind.verb, **times, args=args)


def _flows(
    layout: Layout, spans: Sequence[Span], begin: float, numbers: Iterator[int]
) -> Iterator[dict[str, Any]]:
    span_of = {span.action: span for span in spans}
    for target in spans:
        for action, tensors in _sources(layout, target.action):
            source = span_of.get(action)
            if source is None or source.worker == target.worker:
                continue
            start, end = (_micro(time - begin) for time in source[2:])
            enters, ends = (_micro(time - begin) for time in target[2:])
            if start == end or enters == ends:
                continue  # an arrow needs boxes that have a width
            flow = {"cat": "hand-over", "id": next(numbers)}
            yield _event("s", tensors, source.worker + 1, ts=end - 1, **flow)
            yield _event("f", tensors, target.worker + 1, ts=enters, bp="e", **flow)


def _sources(layout: Layout, action: Action) -> Iterator[tuple[Action, str]]:
    """The actions whose results an action uses, and the name of these tensors."""
    for source in predecessors(action):
        yield source, _tensors(source.kind)
    kind, i, j = action
    if action.by_caller or not kind.direction:
        return
    forward = kind is Kind.FORWARD
    for route in layout.arriving(j) if forward else layout.leaving(j):
        other = route.source if forward else route.target
        yield Action(kind, i, other), f"{_tensors(kind)} of {route.name}"


def _tensors(kind: Kind) -> str:
    return "activations" if kind.direction > 0 else "gradients"


def _micro(seconds: float) -> int:
    return floor(1e6 * seconds)
