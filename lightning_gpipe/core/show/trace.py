"""A timeline in the JSON trace event format, which Perfetto and Chrome open.

Each worker is a thread of the trace, and so is the caller. An action is a complete event ("X") with
its micro-batch, stage and layers as arguments. What one stage hands to another is a flow ("s"
to "f"): an arrow from the end of the one action to the begin of the other. That a copy between
devices took some of the time between them is not recorded.

Times are in microseconds. Events of a thread must not overlap, which holds for what one worker, and
one caller, does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from lightning_gpipe.core.plan import Action, Kind, Layout
from lightning_gpipe.core.run import Span

_PID = 1
_CALLER = 0  # the thread of the caller; that of worker w is w + 1


class Slice(NamedTuple):
    """What the caller did in a time, in seconds."""

    name: str
    start: float
    end: float


def trace_of(
    runs: Iterable[tuple[Layout, Sequence[Span]]], caller: Sequence[Slice] = (), name: str = "GPipe"
) -> dict[str, Any]:
    """What ran when, as a value for ``json.dump``.

    Args:
        runs: Of each mini-batch the layout, and its actions; times in seconds of one clock.
        caller: What the caller's thread did.
        name: What the whole is called.
    """
    runs = list(runs)
    starts = [span.start for _, spans in runs for span in spans] + [each.start for each in caller]
    begin = min(starts, default=0.0)
    events = [_called("process_name", _CALLER, name), *_threads(runs)]
    for title, start, end in caller:
        events.append(_complete(_CALLER, title, "caller", start - begin, end - start, {}))
    for k, (layout, spans) in enumerate(runs):
        events += [_action(layout, span, begin) for span in spans]
        events += _flows(layout, spans, begin, k)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _threads(runs: Sequence[tuple[Layout, Sequence[Span]]]) -> Iterator[dict[str, Any]]:
    """The names of the threads, in the order of the workers."""
    names = {_CALLER: "caller"}
    for layout, _ in runs:
        names |= {w + 1: f"worker {w} ({device})" for w, device in enumerate(layout.devices)}
    for thread, name in sorted(names.items()):
        yield _called("thread_name", thread, name)
        yield _meta("thread_sort_index", thread, {"sort_index": thread})


def _called(what: str, thread: int, name: str) -> dict[str, Any]:
    return _meta(what, thread, {"name": name})


def _meta(what: str, thread: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": _PID, "tid": thread, "args": args}


def _complete(
    thread: int, name: str, category: str, start: float, length: float, args: dict[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": _PID,
        "tid": thread,
        "ts": _micro(start),
        "dur": _micro(length),
        "args": args,
    }


def _action(layout: Layout, span: Span, begin: float) -> dict[str, Any]:
    worker, (kind, i, j), start, end = span
    args = {"micro-batch": i, "stage": j, "runs": str(layout.partitions[j])}
    name = f"{kind.verb} {i}"
    return _complete(worker + 1, name, kind.verb, start - begin, end - start, args)


def _flows(
    layout: Layout, spans: Sequence[Span], begin: float, run: int
) -> Iterator[dict[str, Any]]:
    """The arrows from each action to those on other workers that use its result."""
    found = {span.action: span for span in spans}
    number = 0
    for span in spans:
        for user, what in _users(layout, span.action):
            target = found.get(user)
            if target is None or target.worker == span.worker:
                continue
            flow = {"name": what, "cat": "hand-over", "pid": _PID, "id": f"{run}.{number}"}
            end = max(span.start, span.end - 1e-9)  # within the action that the arrow leaves
            yield {"ph": "s", "tid": span.worker + 1, "ts": _micro(end - begin), **flow}
            entered = {"tid": target.worker + 1, "ts": _micro(target.start - begin), "bp": "e"}
            yield {"ph": "f", **entered, **flow}
            number += 1


def _users(layout: Layout, action: Action) -> Iterator[tuple[Action, str]]:
    """The actions that use the result of one, and what it is."""
    kind, i, j = action
    if kind is Kind.RECOMPUTE:
        return
    what = "activations" if kind is Kind.FORWARD else "gradients"
    yield Action(kind, i, j + kind.direction), what
    for route in layout.leaving(j) if kind is Kind.FORWARD else layout.arriving(j):
        other = route.target if kind is Kind.FORWARD else route.source
        yield Action(kind, i, other), f"{what} of {route.name}"


def _micro(seconds: float) -> float:
    """Microseconds, to the nanosecond."""
    return round(1e6 * seconds, 3)
