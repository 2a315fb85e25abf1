"""The stages in Lightning's profilers, which time the Trainer's calls on the Trainer's thread.

PyTorch's profiler records all threads. The simple profiler, which must not be used from two
threads, gets a row for each stage and kind of action, from the pipeline's timeline.
"""

from __future__ import annotations

from collections import deque

import lightning as L
import torch
from lightning.pytorch.profilers import Profiler, PyTorchProfiler, SimpleProfiler
from torch.utils.hooks import RemovableHandle

from lightning_gpipe.core.pipeline import GPipe
from lightning_gpipe.core.run import Timeline

_ALL_THREADS = "experimental_config"
_AT_ONCE = 16  # mini-batches that are read together: to read one waits for the GPUs


def profiler_of(model: L.LightningModule) -> Profiler:
    """Return the profiler of the model's Trainer."""
    profiler: Profiler = model.trainer.profiler  # type: ignore[attr-defined]  # a connector sets it
    return profiler


class Profiling:
    """The stages in the profiler of a Trainer; with another profiler nothing happens."""

    def __init__(self) -> None:
        self._recording: PyTorchProfiler | None = None
        self._timing: SimpleProfiler | None = None
        self._pending: deque[tuple[str, Timeline]] = deque()
        self._handle: RemovableHandle | None = None

    def record_threads(self, profiler: Profiler) -> None:
        """Let a PyTorchProfiler that has not begun record all threads, unless the user chose."""
        if not isinstance(profiler, PyTorchProfiler) or profiler.profiler is not None:
            return
        options = profiler._profiler_kwargs
        if _ALL_THREADS not in options:
            options[_ALL_THREADS] = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
            self._recording = profiler

    def follow(self, profiler: Profiler, pipeline: GPipe) -> None:
        """Give a SimpleProfiler rows for the stages' actions from now on."""
        if not isinstance(profiler, SimpleProfiler):
            return

        def observe(timeline: Timeline) -> None:
            self._pending.append((path_of(pipeline, timeline), timeline))
            if len(self._pending) > 2 * _AT_ONCE:  # the backward of the latest has not run
                self._read(_AT_ONCE)

        self._timing = profiler
        self._handle = pipeline.observe(observe)

    def abort(self) -> None:
        """End a recording of all threads, of a failed fit: it would last as the profiler does."""
        if self._recording is not None:
            self._recording.teardown(None)

    def release(self) -> None:
        if self._recording is not None:
            self._recording._profiler_kwargs.pop(_ALL_THREADS, None)
        if self._handle is not None:
            self._handle.remove()
            self._read(len(self._pending))
        self._recording = self._timing = self._handle = None

    def _read(self, count: int) -> None:
        assert self._timing is not None, "it was there when the pipeline ran"
        for _ in range(count):
            path, timeline = self._pending.popleft()
            prefix = f"[GPipe]{path}." if path else "[GPipe]"
            for span in timeline.spans:
                action = span.action
                row = f"{prefix}stage {action.j} {action.kind.verb}"
                self._timing.recorded_durations[row].append(span.end - span.start)


def path_of(pipeline: GPipe, timeline: Timeline) -> str:
    """Return the path of the module that ran; empty if there is only one pipeline."""
    if len(pipeline.layouts) == 1:
        return ""
    pairs = zip(pipeline.piped_modules, pipeline.layouts, strict=True)
    return next((piped.path for piped, layout in pairs if layout is timeline.layout), "")
