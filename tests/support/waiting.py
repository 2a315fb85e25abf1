"""Waits for other threads for as long as needed, however busy the machine is.

Durations mean nothing if other programs use the cores. So a test does not measure time: it waits
for the expected event, and fails if it never comes.
"""

import time
from collections.abc import Callable
from typing import TypeVar

PATIENCE = 60.0  # seconds; only a test that fails waits so long
NEVER = 3600.0  # seconds, for a time-out that must not come to the rescue: no test takes so long

T = TypeVar("T")


def awaited(look: Callable[[], T], expected: T, patience: float = PATIENCE) -> T:
    """What ``look`` finds: ``expected`` as soon as it does, or else what it finds in the end."""
    deadline = time.monotonic() + patience
    while (found := look()) != expected and time.monotonic() < deadline:
        time.sleep(0.001)
    return found
