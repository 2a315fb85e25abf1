"""How a thread spends its time: computing, waiting for a core, or waiting for something else.

The engine's own clock only takes timestamps, which cost little. An audit also needs to know what
the thread did in between. So it gives the workers a clock whose timestamps also have the time that
the thread has computed so far, and the time that it was ready to run and had no core. Each takes
two to three microseconds.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from unittest.mock import patch

from lightning_gpipe.core.run import minibatch_run
from lightning_gpipe.core.run.observe.clocks import HostClock

_ACCOUNT = Path("/proc/thread-self/schedstat")  # ns computed, ns queued for a core, how often
ACCOUNTED = _ACCOUNT.exists()

# os.pread would let go of the interpreter lock, and then wait for it: what is to be measured.
_pread = ctypes.PyDLL(None).pread
_pread.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_long]


class Moment(float):
    """A time of ``time.perf_counter``, in seconds.

    Attributes:
        computed: How many seconds the thread had computed by then.
        queued: How many it had been ready to, without a core; 0 where the kernel does not tell.
    """

    computed: float
    queued: float

    @classmethod
    def of(cls, seconds: float, computed: float, queued: float) -> Moment:
        moment = cls(seconds)
        moment.computed, moment.queued = computed, queued
        return moment

    # A worker divides the time of what one call of autograd has computed.

    def __add__(self, other: float) -> float:
        if not isinstance(other, Moment):
            return float(self) + other
        sums = self.computed + other.computed, self.queued + other.queued
        return Moment.of(float(self) + float(other), *sums)

    def __sub__(self, other: float) -> float:
        return self + -1 * other

    def __rmul__(self, factor: float) -> Moment:
        return Moment.of(factor * float(self), factor * self.computed, factor * self.queued)

    def __truediv__(self, number: float) -> Moment:
        return 1 / number * self


class ThreadClock(HostClock):
    """Stands in for the clock of a worker, and must be read on one thread only."""

    def now(self) -> Moment:
        seconds, computed = time.perf_counter(), time.thread_time()
        return Moment.of(seconds, computed, self._queued() if ACCOUNTED else 0.0)

    def _queued(self) -> float:
        size = _pread(self._file, self._text, len(self._text), 0)
        return 1e-9 * int(self._text.raw[:size].split()[1])

    @cached_property
    def _file(self) -> int:
        return os.open(_ACCOUNT, os.O_RDONLY)  # from then on the account of the thread that opened

    @cached_property
    def _text(self) -> ctypes.Array[ctypes.c_char]:
        return ctypes.create_string_buffer(80)

    def __del__(self) -> None:
        if "_file" in self.__dict__:
            os.close(self._file)


@contextmanager
def thread_clocks() -> Iterator[None]:
    """Give one to each worker of a mini-batch that begins in a ``with`` block, on a GPU too."""
    with patch.object(minibatch_run, "clock_of", lambda stream: ThreadClock()):
        yield
