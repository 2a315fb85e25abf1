"""Reads a trace back as Perfetto and Chrome do, and checks what the trace event format demands."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import groupby
from typing import Any

Event = dict[str, Any]

# By phase: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
_FIELDS: dict[str, dict[str, type]] = {
    "M": {"name": str, "pid": int, "tid": int, "args": dict},
    "X": {"name": str, "cat": str, "pid": int, "tid": int, "ts": int, "dur": int, "args": dict},
    "s": {"name": str, "cat": str, "pid": int, "tid": int, "ts": int, "id": int},
    "f": {"name": str, "cat": str, "pid": int, "tid": int, "ts": int, "id": int, "bp": str},
}
_METADATA = {"process_name": "name", "thread_name": "name", "thread_sort_index": "sort_index"}


def events_of(text: str) -> list[Event]:
    """The events of a trace, each of which has the fields of its phase.

    Raises:
        AssertionError: If a reader would reject or drop an event.
    """
    found = json.loads(text, parse_constant=_refuse)
    assert found["displayTimeUnit"] in ("ms", "ns")
    events: list[Event] = found["traceEvents"]
    for event in events:
        fields = {name: type(value) for name, value in event.items() if name != "ph"}
        assert fields == _FIELDS[event["ph"]], event
    _check_metadata(events)
    _check_nesting(events)
    _check_flows(events)
    return events


def named(events: Iterable[Event], name: str) -> dict[int, Any]:
    """What a kind of metadata says of each thread."""
    return {
        each["tid"]: each["args"][_METADATA[name]]
        for each in events
        if each["ph"] == "M" and each["name"] == name
    }


def box_at(events: Iterable[Event], flow: Event) -> Event:
    """The complete event within which an arrow begins or ends."""
    (found,) = [
        each
        for each in events
        if each["ph"] == "X"
        and each["tid"] == flow["tid"]
        and each["ts"] <= flow["ts"] < each["ts"] + each["dur"]
    ]
    return found


def _check_metadata(events: list[Event]) -> None:
    assert all(list(e["args"]) == [_METADATA[e["name"]]] for e in events if e["ph"] == "M")
    threads = {each["tid"] for each in events}
    assert threads == named(events, "thread_name").keys()
    assert threads == named(events, "thread_sort_index").keys()
    assert len(named(events, "process_name")) == 1


def _check_nesting(events: list[Event]) -> None:
    """Perfetto drops an event that overlaps another of its thread in part."""
    boxes = [each for each in events if each["ph"] == "X"]
    assert all(each["ts"] >= 0 and each["dur"] >= 0 for each in boxes)
    boxes.sort(key=lambda each: (each["tid"], each["ts"], -each["dur"]))
    for _, thread in groupby(boxes, lambda each: each["tid"]):
        around: list[int] = []  # where those end that have begun
        for box in thread:
            while around and around[-1] <= box["ts"]:
                around.pop()
            assert not around or box["ts"] + box["dur"] <= around[-1], box
            around.append(box["ts"] + box["dur"])


def _check_flows(events: list[Event]) -> None:
    """An arrow has one begin and one end, each within an event."""
    begins = {each["id"]: each for each in events if each["ph"] == "s"}
    ends = {each["id"]: each for each in events if each["ph"] == "f"}
    assert begins.keys() == ends.keys()
    assert len(begins) + len(ends) == sum(each["ph"] in "sf" for each in events)
    for number, begin in begins.items():
        end = ends[number]
        assert (begin["name"], begin["cat"], end["bp"]) == (end["name"], end["cat"], "e")
        assert begin["ts"] <= end["ts"] and box_at(events, begin) and box_at(events, end)


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")
