"""A trace read back: what Perfetto and Chrome need, and what it says."""

import json
from itertools import pairwise
from typing import Any

import torch

from lightning_gpipe.core.layout import Layout, Partition
from lightning_gpipe.core.programs import Route, SkipName
from lightning_gpipe.core.schedules import Action, Kind, Span, fill_drain, schedule_for
from lightning_gpipe.core.show import Slice, TracedRun, trace_of
from tests.support.placements import one_each
from tests.support.traces import box_at, events_of, named


def layout(*routes: Route) -> Layout:
    partitions = tuple(Partition(j, j, (torch.nn.Tanh(),), ()) for j in range(3))
    return Layout(partitions, (torch.device("cpu"),) * 3, (0, 1, 2), routes)


def spans_of(layout: Layout, m: int) -> list[Span]:
    """A mini-batch as its schedule predicts it, in actions of a millisecond, from second 100."""
    schedule = fill_drain(m, layout.placement, recomputed=m - 1)
    start = schedule.simulation.start
    return [
        Span(layout.placement[a.j], a, 100 + 1e-3 * k, 100 + 1e-3 * (k + 1))
        for a, k in start.items()
    ]


def read_back(*routes: Route, caller: tuple[Slice, ...] = ()) -> list[dict[str, Any]]:
    where = layout(*routes)
    return events_of(json.dumps(trace_of([TracedRun(where, spans_of(where, 2))], caller, "Net")))


def test_every_action_is_a_complete_event_on_its_worker() -> None:
    events = [each for each in read_back() if each["ph"] == "X"]

    assert sorted(each["name"] for each in events if each["tid"] == 2) == [
        "backward 0",
        "backward 1",
        "forward 0",
        "forward 1",
        "recompute 0",
    ]
    first = min(events, key=lambda each: each["ts"])
    assert (first["ts"], first["dur"], first["tid"], first["cat"]) == (0, 1000, 1, "forward")
    assert first["args"] == {"micro-batch": 0, "stage": 0, "runs": "layer 0"}


def test_threads_have_names_in_the_order_of_the_workers() -> None:
    events = read_back()

    assert named(events, "process_name") == {0: "Net"}
    assert named(events, "thread_name") == {
        0: "caller",
        1: "worker 0 (cpu), stage 0",
        2: "worker 1 (cpu), stage 1",
        3: "worker 2 (cpu), stage 2",
    }
    assert named(events, "thread_sort_index") == {k: k for k in range(4)}


def test_events_that_follow_at_once_do_not_overlap_by_rounding() -> None:
    """Perfetto would drop the second of two that share a nanosecond."""
    times = [100 + 1e-7 * k**2 for k in range(200)]
    caller = tuple(Slice(f"{k}", a, b) for k, (a, b) in enumerate(pairwise(times)))

    events = read_back(caller=caller)

    found = [each for each in events if each["ph"] == "X" and each["tid"] == 0]
    assert [each["name"] for each in found] == [f"{k}" for k in range(199)]
    assert all(a["ts"] + a["dur"] == b["ts"] for a, b in pairwise(found))


def test_arrows_of_several_mini_batches_are_told_apart() -> None:
    where = layout()
    first = spans_of(where, 2)
    second = [span._replace(start=span.start + 1, end=span.end + 1) for span in first]

    events = events_of(json.dumps(trace_of([TracedRun(where, first), TracedRun(where, second)])))

    assert len({each["id"] for each in events if each["ph"] == "s"}) == 2 * 2 * 4


def test_arrows_go_from_an_action_to_the_one_that_uses_its_result() -> None:
    route = Route(SkipName(None, "skip"), 0, 2)
    events = read_back(route)

    def at(event: dict[str, Any]) -> str:
        """The action within which an arrow ends."""
        box = box_at(events, event)
        return f"{box['name']} on {box['args']['stage']}"

    starts = {each["id"]: each for each in events if each["ph"] == "s"}
    ends = {each["id"]: each for each in events if each["ph"] == "f"}
    arrows = {(at(starts[k]), at(ends[k]), starts[k]["name"]) for k in starts}
    assert ("forward 1 on 0", "forward 1 on 1", "activations") in arrows
    assert ("forward 1 on 0", "forward 1 on 2", "activations of 'skip'") in arrows
    assert ("backward 0 on 2", "backward 0 on 0", "gradients of 'skip'") in arrows
    assert len(arrows) == 2 * (2 + 2 + 1 + 1)


def test_trace_of_nothing() -> None:
    assert [each["ph"] for each in trace_of([])["traceEvents"]] == ["M"] * 3


def test_kinds_are_told_apart() -> None:
    found = {each["cat"] for each in read_back() if each["ph"] == "X"}

    assert found == {"forward", "recompute", "backward"}


def test_row_of_the_caller() -> None:
    """Of the one micro-batch: P0, F0 of three stages, L0, B0 of three stages, B0 of the caller."""
    where = layout()
    schedule = schedule_for("1f1b", 1, one_each(3))
    spans = [
        Span(schedule.worker_of(a), a, 100 + 1e-3 * k, 100 + 1e-3 * (k + 1))
        for k, a in enumerate(schedule.interleaved)
    ]

    events = events_of(json.dumps(trace_of([TracedRun(where, spans)])))

    assert named(events, "thread_name")[4] == "caller, by micro-batch (cpu)"
    own = [each for each in events if each["ph"] == "X" and each["tid"] == 4]
    assert [each["name"] for each in own] == ["prepare 0", "loss 0", "backward 0"]
    assert {tuple(each["args"].items()) for each in own} == {(("micro-batch", 0),)}
    arrows = {
        (begin["tid"], end["tid"], begin["name"])
        for begin in events
        for end in events
        if (begin["ph"], end["ph"]) == ("s", "f") and begin["id"] == end["id"]
    }
    forward = {(4, 1, "activations"), (3, 4, "activations")}
    backward = {(4, 3, "gradients"), (1, 4, "gradients")}
    inside = {(k, k + 1, "activations") for k in (1, 2)} | {(k + 1, k, "gradients") for k in (1, 2)}
    assert arrows == forward | backward | inside


def test_no_arrow_to_what_takes_no_time() -> None:
    where = layout()
    first, second = (Span(j, Action(Kind.FORWARD, 0, j), 100.0 + j, 101.0 + j) for j in range(2))

    events = events_of(
        json.dumps(trace_of([TracedRun(where, [first, second._replace(end=101.0)])]))
    )

    assert not [each for each in events if each["ph"] in "sf"]
