"""One mini-batch at a time.

If two of the user's threads ran mini-batches at once, they would wait for one another's workers,
and each would see the other's changes to the layers. So they take turns. After a run has failed, a
worker may still be in the middle of an action: the next run waits for it too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Exclusion:
    """Lets one thread at a time run mini-batches; reentrant.

    Args:
        before: Called when a thread gets its turn.
    """

    def __init__(self, before: Callable[[], None] = lambda: None) -> None:
        self._lock = threading.RLock()
        self._before = before

    @contextmanager
    def entered(self) -> Iterator[None]:
        """A ``with`` block that one thread at a time can be in."""
        with self._lock:
            self._before()
            yield
