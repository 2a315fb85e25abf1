"""Ctrl-C at any line of the calling thread."""

import sys
from collections.abc import Callable, Collection
from types import FrameType
from typing import Any


def interrupted(run: Callable[[], object], files: Collection[str], at: int) -> bool:
    """Run, with an interrupt at a line of ``files``; whether there were as many.

    Args:
        run: What to run.
        files: The source files whose lines count.
        at: The number of the line, the first that runs being 1.
    """
    seen = 0

    def on_line(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal seen
        if event == "line":
            seen += 1
            if seen == at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return on_line

    def on_call(frame: FrameType, event: str, _: Any) -> Any:
        return on_line if frame.f_code.co_filename in files else None

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        run()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False
