"""The peak memory of a step: measured by running it, or counted without.

On a GPU the caching allocator records the peak. On CPU the profiler records every allocation; by
default only those on the thread that started it, and even the option ``profile_all_threads`` leaves
memory out. A thread can join, though, by a function that PyTorch has for C++: here each thread
does, the first time it runs a layer.

A step that is too large for the machine can still be counted: every operation of forward and
backward runs on fake tensors, which have a shape and no memory, and the storages that would be
alive are summed up. That leaves out what a kernel allocates for itself and frees before it returns.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.profiler import profile
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_MARK = 1_000_003  # bytes; odd, so no tensor of numbers has as many
_thread = threading.local()  # what it joined, from which PyTorch never releases it
_NOISE = (b"record_function.cpp", b"observer.cpp", b"SyncActivityProfiler", b"CPUAllocator.cpp")


def peak_bytes(
    step: Callable[[], object],
    *,
    clear: Callable[[], object] = lambda: None,
    device: str | torch.device = "cpu",
) -> int:
    """The most that ``step`` has allocated at once, beyond what was there before it.

    It is called once to warm up, and once more. On CPU, what a thread allocates counts from the
    first layer that it runs on, a worker thread can be measured only once, and a process that was
    measured should time nothing afterwards.

    Args:
        step: What to measure.
        clear: Called before, to drop what the warm-up left.
        device: Where it allocates, a GPU or the CPU.

    Raises:
        RuntimeError: If a worker thread was measured before.
    """
    device = torch.device(device)
    if device.type == "cuda":
        return _peak_on_gpu(step, clear, device)
    return max(accumulate(_sizes_on_cpu(step, clear), initial=0))


class Counting(TorchDispatchMode):
    """Sums up the storages that operations make, for the duration of a ``with`` block.

    Args:
        tensors: What is there before, and counts as well.

    Attributes:
        now: The bytes that are alive.
        peak: The most that were.
    """

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._alive: set[int] = set()
        for tensor in tensors:
            self._add(tensor)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._add(leaf)
        return result

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._alive:
            self._alive.add(key)
            weakref.finalize(storage, self._drop, key, size).atexit = False
            self.now += size
            self.peak = max(self.peak, self.now)

    def _drop(self, key: int, size: int) -> None:
        self._alive.discard(key)
        self.now -= size


def _peak_on_gpu(
    step: Callable[[], object], clear: Callable[[], object], device: torch.device
) -> int:
    step()
    clear()
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _sizes_on_cpu(step: Callable[[], object], clear: Callable[[], object]) -> list[int]:
    """What the second of two steps allocated, and as negative numbers freed, in order of time."""
    join, here, this = _joining(), threading.get_ident(), object()

    def before_forward(module: nn.Module, inputs: object) -> None:
        if threading.get_ident() == here:  # `profile` is for this thread
            return
        found = getattr(_thread, "joined", None)
        if found is None:
            _thread.joined = this
            join()
        elif found is not this:
            raise RuntimeError("a worker thread can be measured once: measure a new pipeline.")

    hook = register_module_forward_pre_hook(before_forward)
    with _less_noise(), profile(profile_memory=True) as profiled:
        try:
            step()
            clear()
            mark = torch.empty(_MARK, dtype=torch.uint8)
            step()
        finally:
            hook.remove()
    del mark
    results = profiled.kineto_results
    assert results is not None
    events = [event for event in results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    sizes = [event.nbytes() for event in events]
    return sizes[sizes.index(_MARK) + 1 :]


def _joining() -> Callable[[], object]:
    """``torch::autograd::profiler::enableProfilerInChildThread``, which Python has no name for."""
    (library,) = (Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*")
    join = ctypes.CDLL(str(library))._ZN5torch8autograd8profiler27enableProfilerInChildThreadEv
    join.restype = None
    return join


@contextmanager
def _less_noise() -> Iterator[None]:
    """Leave out what the profiler prints of each thread that joins, past sys.stderr mostly."""
    before = os.dup(2)
    with tempfile.TemporaryFile() as printed, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "ProfilerStateBase already has a registered callback")
        os.dup2(printed.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(before, 2)
            os.close(before)
            printed.seek(0)
            for line in printed:
                if not any(word in line for word in _NOISE):
                    os.write(2, line)
