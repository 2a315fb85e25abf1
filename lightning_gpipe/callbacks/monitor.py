"""Logs how busy the stages are, and writes a trace and a picture of the pipeline.

Reading when actions ran waits for GPUs, so the callback reads that of a step only if it is logged.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from lightning_gpipe.callbacks.running import (
    BETWEEN,
    RecordedStep,
    check_positive,
    milliseconds,
    peak_memory,
    pipeline_of,
    strategy_of,
)
from lightning_gpipe.core.pipeline import GPipe
from lightning_gpipe.core.run import Observation, Timeline, seconds_behind, spans_of_all
from lightning_gpipe.core.show import (
    INSTALL,
    Slice,
    TracedRun,
    can_draw,
    timeline_picture,
    trace_of,
)
from lightning_gpipe.strategy import path_of

TRACE, PICTURE = "pipeline_trace.json", "pipeline_timeline.png"
_STEPS = 5  # the latest recorded steps, which the trace shows


class PipelineMonitor(Callback):
    """Logs how busy the stages are, and writes a trace and a picture of the pipeline.

    Example::

        Trainer(strategy=GPipeStrategy(...), callbacks=[PipelineMonitor()], devices=4)

    Every few steps it logs the measured bubble and that of the schedule, the share of time in which
    each stage is busy and the milliseconds for which it waits, the imbalance (by how much the
    busiest stage is above the mean), micro-batches per second, and the peak memory of each device
    since the process began, of all processes. At the end of a fit it writes
    ``pipeline_trace.json``, which Perfetto and Chrome open, and ``pipeline_timeline.png``, and
    prints how long the stages and the rest of a step took.

    Args:
        every_n_steps: How often to record; None takes the Trainer's ``log_every_n_steps``.
        folder: Where to write; None takes the logger's folder, or else ``default_root_dir``.
        progress_bar: Whether the progress bar shows the measured bubble.

    Attributes:
        metrics: The metrics that were logged last.

    Raises:
        TypeError, ValueError: If an argument has the wrong type or an impossible value.
    """

    def __init__(
        self,
        every_n_steps: int | None = None,
        folder: str | Path | None = None,
        *,
        progress_bar: bool = False,
    ) -> None:
        if every_n_steps is not None:
            check_positive("every_n_steps", every_n_steps)
        self.every_n_steps, self.folder, self.progress_bar = every_n_steps, folder, progress_bar
        self.metrics: dict[str, float] = {}
        self._begin()

    def _begin(self) -> None:
        self._behind = 0.0  # seconds, this process's clock behind that of the first
        self._timelines: list[Timeline] = []  # of the current step
        self._marks: list[tuple[str, float]] = []  # the caller's activities and when they began
        self._steps: deque[RecordedStep] = deque(maxlen=_STEPS)
        self._latest: dict[str, Observation] = {}  # of each pipeline
        self._step = 0

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        strategy_of(trainer, self)

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pipeline = pipeline_of(trainer, self)
        self._begin()
        self._behind = seconds_behind(strategy_of(trainer, self).all_in_pipeline)
        pipeline.observe(self._see)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._begin()

    # The hooks below mark what the caller's thread does.

    @override
    def on_train_batch_start(self, *_: Any) -> None:
        self._timelines.clear()
        del self._marks[:-1]  # but the last one: since then a batch was loaded
        self._mark("training_step")

    @override
    def on_before_backward(self, *_: Any) -> None:
        self._mark("backward")

    @override
    def on_after_backward(self, *_: Any) -> None:
        self._mark("optimizer step")

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *_: Any, **__: Any
    ) -> None:
        self._mark(BETWEEN)
        self._step += 1
        every = self.every_n_steps or getattr(trainer, "log_every_n_steps", 0)
        if every and self._step % every == 0:
            self._record(trainer)
            if self.progress_bar:
                bubbles = {k: x for k, x in self.metrics.items() if k.endswith("/bubble")}
                pl_module.log_dict(bubbles, prog_bar=True, logger=False)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._steps:  # the fit had fewer steps than the interval
            self._record(trainer)
        if self._steps:
            self._finish(trainer, pl_module)
        else:
            rank_zero_info("PipelineMonitor has nothing to show: no step ran the pipeline.")

    def _see(self, timeline: Timeline) -> None:
        if self._marks and self._marks[-1][0] != BETWEEN:  # skip evaluation
            self._timelines.append(timeline)

    def _mark(self, name: str) -> None:
        self._marks.append((name, perf_counter()))

    def _record(self, trainer: Trainer) -> None:
        pipeline, all_of = pipeline_of(trainer, self), strategy_of(trainer, self).all_in_pipeline
        spans_of = [
            (timeline, spans_of_all(all_of, timeline.spans, self._behind))
            for timeline in self._timelines
        ]
        observations = [
            (path_of(pipeline, timeline), observation)
            for timeline, spans in spans_of
            if (observation := Observation.of(timeline, spans)) is not None
        ]
        if not observations:
            return
        # Only pipelines of one process have actions of the caller, on the clock of that process.
        runs = [
            TracedRun(timeline.layout, [*spans, *timeline.caller])
            for timeline, spans in spans_of
            if timeline.layout is not None
        ]
        pairs = zip(self._marks, self._marks[1:], strict=False)
        caller = [Slice(name, start, end) for (name, start), (_, end) in pairs]
        seconds = sum(observation.length for _, observation in observations)
        step = RecordedStep(self._step, runs, caller, seconds)
        self._steps.append(step)
        latest = dict(observations)
        self._latest |= latest
        self.metrics = {}
        for name, observation in latest.items():
            prefix = f"pipeline/{name}/" if name else "pipeline/"
            for key, metric in _metrics(observation).items():
                self.metrics[prefix + key] = metric
        count = sum(timeline.schedule.m for timeline in self._timelines)
        self.metrics["pipeline/micro_batches_per_second"] = count / step.length
        for device, peak in _peaks(pipeline, all_of):
            self.metrics[f"pipeline/peak_memory_GiB/{device}"] = peak / 2**30
        for logger in trainer.loggers:
            logger.log_metrics(self.metrics, step=trainer.fit_loop.epoch_loop._batches_that_stepped)

    def _finish(self, trainer: Trainer, model: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        for name, observation in self._latest.items():
            rank_zero_info(_summary(name, observation))
        rank_zero_info(f"PipelineMonitor: {self._steps[-1]}.")
        folder = Path(self.folder or trainer.log_dir or trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        runs = [run for step in self._steps for run in step.runs]
        caller = [slice_ for step in self._steps for slice_ in step.caller]
        trace = trace_of(runs, caller, type(model).__name__)
        (folder / TRACE).write_text(json.dumps(trace), "utf-8")
        rank_zero_info(f"PipelineMonitor: {folder / TRACE} opens in https://ui.perfetto.dev.")
        if not can_draw():
            rank_zero_info(f"PipelineMonitor: no picture, since matplotlib is missing: {INSTALL}.")
            return
        self._draw(type(model).__name__, folder / PICTURE)
        rank_zero_info(f"PipelineMonitor: {folder / PICTURE} shows step {self._steps[-1].number}.")

    def _draw(self, title: str, path: Path) -> None:
        step = self._steps[-1]
        layout = step.runs[0].layout
        all_spans = [span for run in step.runs for span in run.spans]
        workers = [
            "\n".join([str(device), *(str(layout.partitions[j]) for j in layout.stages_of(w))])
            for w, device in enumerate(layout.devices)
        ]
        if any(span.action.by_caller for span in all_spans):
            workers.append(f"{layout.outside}\ncaller")
        first = next(iter(self._latest.values()))
        note = (
            f"{step}\none mini-batch of {first.schedule.m} micro-batches, bubble "
            f"{first.bubble:.0%} ({first.schedule.bubble:.0%} by the schedule)"
        )
        timeline_picture(all_spans, workers, title=title, note=note).savefig(path)


def _metrics(observation: Observation) -> dict[str, float]:
    metrics = {
        "bubble": observation.bubble,
        "bubble_by_schedule": observation.schedule.bubble,
        "imbalance": observation.imbalance,
    }
    for j, (busy, wait) in enumerate(zip(observation.busy, observation.waits, strict=True)):
        metrics[f"stage_{j}/busy"] = busy / observation.length
        metrics[f"stage_{j}/wait_ms"] = 1e3 * wait
    if observation.caller is not None:
        metrics["caller/busy"] = observation.caller / observation.length
    return metrics


def _peaks(pipeline: GPipe, all_of: Callable[[Any], list[Any]]) -> Iterator[tuple[str, float]]:
    """Yield each device and its peak in bytes, with the rank if there are several processes."""
    devices = dict.fromkeys(pipeline.layout.devices_here)
    of_ranks = all_of([(str(device), peak_memory(device)) for device in devices])
    for rank, peaks in enumerate(of_ranks):
        for device, peak in peaks:
            if peak is not None:
                yield f"rank_{rank}/{device}" if len(of_ranks) > 1 else device, peak


def _summary(name: str, observation: Observation) -> str:
    of_module = f" of {name}" if name else ""
    busy = ", ".join(map(milliseconds, observation.busy))
    return (
        f"PipelineMonitor: a mini-batch takes {milliseconds(observation.length)} in the "
        f"pipeline{of_module}, its bubble is {observation.bubble:.0%} "
        f"({observation.schedule.bubble:.0%} by the schedule), its stages are busy for {busy}."
    )
