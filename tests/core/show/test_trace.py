"""A trace read back: what Perfetto and Chrome need, and what it says."""

import json
from itertools import groupby, pairwise
from typing import Any

import torch

from lightning_gpipe.core.plan import Kind, Layout, Partition, Route, SkipName, fill_drain
from lightning_gpipe.core.run import Span
from lightning_gpipe.core.show import Slice, trace_of


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
    text = json.dumps(trace_of([(where, spans_of(where, 2))], caller, "Net"))
    found = json.loads(text)
    assert found["displayTimeUnit"] in ("ms", "ns")
    events: list[dict[str, Any]] = found["traceEvents"]
    return events


def test_every_action_is_a_complete_event_on_its_worker() -> None:
    events = [each for each in read_back() if each["ph"] == "X"]

    assert {tuple(sorted(each)) for each in events} == {
        ("args", "cat", "dur", "name", "ph", "pid", "tid", "ts")
    }
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
    names = {e["tid"]: e["args"]["name"] for e in read_back() if e["name"] == "thread_name"}

    assert names == {0: "caller", 1: "worker 0 (cpu)", 2: "worker 1 (cpu)", 3: "worker 2 (cpu)"}


def test_events_of_a_thread_do_not_overlap() -> None:
    caller = (Slice("training_step", 99.99, 100.002), Slice("backward", 100.002, 100.02))
    events = [each for each in read_back(caller=caller) if each["ph"] == "X"]

    assert [each["name"] for each in events if each["tid"] == 0] == ["training_step", "backward"]
    events.sort(key=lambda each: (each["tid"], each["ts"]))
    for _, thread in groupby(events, lambda each: each["tid"]):
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-3 for a, b in pairwise(thread))


def test_arrows_go_from_an_action_to_the_one_that_uses_its_result() -> None:
    route = Route(SkipName(None, "skip"), 0, 2)
    events = read_back(route)
    boxes = [each for each in events if each["ph"] == "X"]

    def at(event: dict[str, Any]) -> str:
        """The action within which an arrow ends."""
        (box,) = [
            box
            for box in boxes
            if box["tid"] == event["tid"] and 0 <= event["ts"] - box["ts"] < box["dur"]
        ]
        return f"{box['name']} on {box['args']['stage']}"

    starts = {each["id"]: each for each in events if each["ph"] == "s"}
    ends = {each["id"]: each for each in events if each["ph"] == "f"}
    assert starts.keys() == ends.keys() and all(each["bp"] == "e" for each in ends.values())
    arrows = {(at(starts[k]), at(ends[k]), starts[k]["name"]) for k in starts}
    assert ("forward 1 on 0", "forward 1 on 1", "activations") in arrows
    assert ("forward 1 on 0", "forward 1 on 2", "activations of 'skip'") in arrows
    assert ("backward 0 on 2", "backward 0 on 0", "gradients of 'skip'") in arrows
    assert len(arrows) == 2 * (2 + 2 + 1 + 1)


def test_trace_of_nothing() -> None:
    assert [each["ph"] for each in trace_of([])["traceEvents"]] == ["M"] * 3


def test_kinds_are_told_apart() -> None:
    found = {each["cat"] for each in read_back() if each["ph"] == "X"}

    assert found == {kind.verb for kind in Kind}
