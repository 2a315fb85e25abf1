"""Ctrl-C at any line of the calling thread."""

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

Line = tuple[str, int]  # the file and the number of the line in it


def interrupted(run: Callable[[], object], files: Collection[str], at: int) -> bool:
    """Run, with an interrupt at a line of ``files``; whether there were as many.

    Args:
        run: What to run.
        files: The source files whose lines count.
        at: The number of the line, the first that runs being 1.
    """
    return _interrupted(run, files, at, lambda _: True)


def interrupted_at(run: Callable[[], object], line: Line, time: int) -> bool:
    """Run, with an interrupt before a line runs for the first ``time``, 1, or a later one."""
    return _interrupted(run, {line[0]}, time, line.__eq__)


def first_and_last(
    run: Callable[[], object], files: Collection[str], *, both: bool = True
) -> list[tuple[Line, int]]:
    """Each line of ``files`` that runs, with its first time, 1, and its last, if it has two.

    Args:
        run: What to run.
        files: The source files whose lines count.
        both: Whether a line comes with both; else the lines take turns, with the first or the last.
    """
    lines: list[Line] = []
    with _traced(files, lines.append):
        run()
    moments = []
    for k, (line, last) in enumerate(Counter(lines).items()):
        times = sorted({1, last})
        moments += [(line, time) for time in (times if both else [times[k % len(times)]])]
    return moments


def _interrupted(
    run: Callable[[], object], files: Collection[str], time: int, counts: Callable[[Line], bool]
) -> bool:
    seen = 0

    def strike(line: Line) -> None:
        nonlocal seen
        seen += counts(line)
        if seen == time:
            sys.settrace(None)
            raise KeyboardInterrupt

    try:
        with _traced(files, strike):
            run()
    except KeyboardInterrupt:
        return True
    return False


@contextmanager
def _traced(files: Collection[str], act: Callable[[Line], None]) -> Iterator[None]:
    """Calls ``act`` before each line of ``files`` that this thread runs."""

    def on_line(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            act((frame.f_code.co_filename, frame.f_lineno))
        return on_line

    def on_call(frame: FrameType, event: str, _: Any) -> Any:
        return on_line if frame.f_code.co_filename in files else None

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        yield
    finally:
        sys.settrace(before)
