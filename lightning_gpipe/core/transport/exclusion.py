"""One mini-batch at a time.

Two threads of the user that ran mini-batches at once would wait for one another's workers, and each
would find the layers in a state of the other's making. So they take turns. A run that failed may
still be going on in a worker that is in the middle of an action: the next one waits for it too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Exclusion:
    """Lets one thread at a time run mini-batches, as often nested as it likes.

    Args:
        before: Called when a thread has got its turn.
    """

    def __init__(self, before: Callable[[], None] = lambda: None) -> None:
        self._lock = threading.RLock()
        self._before = before

    @contextmanager
    def entered(self) -> Iterator[None]:
        """A ``with`` block in which no other thread is in one."""
        with self._lock:
            self._before()
            yield
