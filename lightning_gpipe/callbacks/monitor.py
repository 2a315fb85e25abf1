"""Logs how busy the pipeline is, and leaves a trace and a picture of it.

The pipeline records what runs when in every mini-batch. This reads it, which waits for GPUs, in the
steps that are recorded, and in no other.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from lightning_gpipe.adapted import path_of
from lightning_gpipe.callbacks.best_balance import best_balance
from lightning_gpipe.callbacks.memory import peak_memory
from lightning_gpipe.callbacks.one_clock import OneClock
from lightning_gpipe.callbacks.required import (
    check_positive,
    milliseconds,
    pipeline_of,
    strategy_of,
)
from lightning_gpipe.core.pipeline import GPipe
from lightning_gpipe.core.plan import Layout, changes, doubts, parts_of
from lightning_gpipe.core.run import Observation, Span, Timeline
from lightning_gpipe.core.show import INSTALL, Slice, can_draw, timeline_picture, trace_of

TRACE, PICTURE = "pipeline_trace.json", "pipeline_timeline.png"
_KEPT = 5  # so many of the latest recorded steps are in the trace
_BETWEEN = "between steps"
_WORTH = 0.02  # a change that brings less is not worth a word


class _Step(NamedTuple):
    """A step that was recorded: its number, its mini-batches, what else ran."""

    number: int
    runs: list[tuple[Layout, list[Span]]]
    caller: list[Slice]


class PipelineMonitor(Callback):
    """Logs how busy the stages are, and writes a trace and a picture of the pipeline.

    Example::

        Trainer(strategy=GPipeStrategy(...), callbacks=[PipelineMonitor()], devices=4)

    To the Trainer's loggers go, every few steps: the bubble as it was measured and as the schedule
    has it, the share of time in which each stage is busy, and the milliseconds in which it waits,
    the imbalance (by how much the busiest stage is above the mean), micro-batches per second, and
    the peak of the memory of each device since the process began. Over several processes these are
    of all of them, put together in the steps that are recorded. At the end of a fit,
    ``pipeline_trace.json``, which Perfetto and Chrome open, and ``pipeline_timeline.png`` are
    written, and a line says which other settings would be faster.

    Args:
        every_n_steps: How often to record; None takes the Trainer's ``log_every_n_steps``.
        folder: Where to write; None takes the logger's folder, or else ``default_root_dir``.

    Attributes:
        metrics: What was logged last.

    Raises:
        TypeError, ValueError: If an argument has the wrong type or an impossible value.
    """

    def __init__(self, every_n_steps: int | None = None, folder: str | Path | None = None) -> None:
        if every_n_steps is not None:
            check_positive("every_n_steps", every_n_steps)
        self.every_n_steps, self.folder = every_n_steps, folder
        self.metrics: dict[str, float] = {}
        self._begin()

    def _begin(self) -> None:
        self._handle: Any = None
        self._clock = OneClock(None)
        self._timelines: list[Timeline] = []  # of the step that runs
        self._marks: list[tuple[str, float]] = []  # what began when
        self._steps: deque[_Step] = deque(maxlen=_KEPT)
        self._latest: dict[str, deque[Observation]] = {}  # of each pipeline, in these steps
        self._seen = 0

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        strategy_of(trainer, self)

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pipeline = pipeline_of(trainer, self)
        self._begin()
        self._clock = OneClock(strategy_of(trainer, self).pipeline_group)
        self._handle = pipeline.observe(self._see)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._handle is not None:
            self._handle.remove()
        self._begin()

    # What the caller's thread does, by the hooks that it passes.

    @override
    def on_train_batch_start(self, *_: Any) -> None:
        self._timelines.clear()
        del self._marks[:-1]  # what began with the end of the step before: loading a batch
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
        self._mark(_BETWEEN)
        self._seen += 1
        every = self.every_n_steps or getattr(trainer, "log_every_n_steps", 0)
        if every and self._seen % every == 0:
            self._record(trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._steps:  # the fit was shorter than that
            self._record(trainer)
        if self._steps:
            self._finish(trainer, pl_module)
        else:
            rank_zero_info("PipelineMonitor has nothing to show: no step ran the pipeline.")

    def _see(self, timeline: Timeline) -> None:
        if self._marks and self._marks[-1][0] != _BETWEEN:  # no evaluation
            self._timelines.append(timeline)

    def _mark(self, name: str) -> None:
        self._marks.append((name, perf_counter()))

    def _record(self, trainer: Trainer) -> None:
        """Read what the latest step has left, and log it."""
        pipeline = pipeline_of(trainer, self)
        read = [(each, self._clock.spans(each.spans)) for each in self._timelines]
        found = {
            path_of(pipeline, timeline): each
            for timeline, spans in read
            if (each := Observation.of(timeline, spans)) is not None
        }
        if not found:
            return
        # The caller has a row in pipelines of one process only, whose clock needs no other.
        runs = [(layout, [*spans, *each.caller]) for each, spans in read if (layout := each.layout)]
        pairs = zip(self._marks, self._marks[1:], strict=False)
        caller = [Slice(name, start, end) for (name, start), (_, end) in pairs]
        self._steps.append(_Step(self._seen, runs, caller))
        self.metrics = {}
        for name, observation in found.items():
            self._latest.setdefault(name, deque(maxlen=_KEPT)).append(observation)
            prefix = f"pipeline/{name}/" if name else "pipeline/"
            self.metrics |= {prefix + key: each for key, each in _metrics(observation).items()}
        length = caller[-1].end - caller[0].start if caller else 0.0
        if length:
            count = sum(timeline.schedule.m for timeline in self._timelines)
            self.metrics["pipeline/micro_batches_per_second"] = count / length
        for device, peak in self._peaks(pipeline):
            self.metrics[f"pipeline/peak_memory_GiB/{device}"] = peak / 2**30
        for logger in trainer.loggers:
            logger.log_metrics(self.metrics, step=trainer.fit_loop.epoch_loop._batches_that_stepped)

    def _peaks(self, pipeline: GPipe) -> Iterator[tuple[str, float]]:
        """The name of each device, and its peak in bytes; of several processes, with the rank."""
        devices = dict.fromkeys(pipeline.layout.devices_here)
        everyone = self._clock.all([(str(each), peak_memory(each)) for each in devices])
        for rank, own in enumerate(everyone):
            for device, peak in own:
                if peak is not None:
                    yield f"rank_{rank}/{device}" if len(everyone) > 1 else device, peak

    def _finish(self, trainer: Trainer, model: LightningModule) -> None:
        """Write the files, and say what to change."""
        pipeline = pipeline_of(trainer, self)
        if not trainer.is_global_zero:
            return
        for name, latest in self._latest.items():
            rank_zero_info(_said(name, pipeline, latest, steps=self._steps_may_be(trainer)))
        folder = Path(self.folder or trainer.log_dir or trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        runs = [run for step in self._steps for run in step.runs]
        caller = [each for step in self._steps for each in step.caller]
        trace = trace_of(runs, caller, type(model).__name__)
        (folder / TRACE).write_text(json.dumps(trace), "utf-8")
        rank_zero_info(f"PipelineMonitor: {folder / TRACE} opens in https://ui.perfetto.dev.")
        if not can_draw():
            rank_zero_info(f"PipelineMonitor: no picture, since matplotlib is missing: {INSTALL}.")
            return
        self._draw(type(model).__name__, folder / PICTURE)
        rank_zero_info(f"PipelineMonitor: {folder / PICTURE} shows step {self._steps[-1].number}.")

    def _steps_may_be(self, trainer: Trainer) -> bool:
        """Whether training_step could be called for each micro-batch."""
        pipeline, module = pipeline_of(trainer, self), trainer.lightning_module
        alone = len(pipeline.taken) == 1 and not pipeline.layout.spread
        several = strategy_of(trainer, self).is_distributed
        return alone and not several and module.automatic_optimization

    def _draw(self, title: str, path: Path) -> None:
        step = self._steps[-1]
        layout = step.runs[0][0]
        workers = [
            "\n".join([str(device), *(str(layout.partitions[j]) for j in layout.stages_of(w))])
            for w, device in enumerate(layout.devices)
        ]
        if any(span.action.by_caller for _, spans in step.runs for span in spans):
            workers.append(f"{layout.outside}\ncaller")
        first = next(iter(self._latest.values()))[-1]
        note = (
            f"one mini-batch of {first.schedule.m} micro-batches, bubble {first.bubble:.0%} "
            f"({first.schedule.bubble:.0%} by the schedule)"
        )
        spans = [span for _, each in step.runs for span in each]
        picture = timeline_picture(spans, workers, title=f"{title}, step {step.number}", note=note)
        picture.savefig(path)


def _metrics(observation: Observation) -> dict[str, float]:
    """What is logged of a mini-batch."""
    found = {
        "bubble": observation.bubble,
        "bubble_by_schedule": observation.schedule.bubble,
        "imbalance": observation.imbalance,
    }
    for j, (busy, wait) in enumerate(zip(observation.busy, observation.waits, strict=True)):
        found[f"stage_{j}/busy"] = busy / observation.length
        found[f"stage_{j}/wait_ms"] = 1e3 * wait
    if observation.caller is not None:
        found["caller/busy"] = observation.caller / observation.length
    return found


def _said(name: str, pipeline: GPipe, latest: Sequence[Observation], *, steps: bool) -> str:
    """The line at the end of a fit: the time of a mini-batch, and settings to change.

    Args:
        name: The path of the module that runs as a pipeline, if there are several.
        pipeline: The pipelines.
        latest: What mini-batches of it took.
        steps: Whether micro-batches may have losses of their own.
    """
    observation = latest[-1]
    what = f" of {name}" if name else ""
    busy = ", ".join(map(milliseconds, observation.busy))
    return (
        f"PipelineMonitor: a mini-batch takes {milliseconds(observation.length)} in the "
        f"pipeline{what}, its bubble is {observation.bubble:.0%} "
        f"({observation.schedule.bubble:.0%} by the schedule), its stages are busy for "
        f"{busy}. {_advice(name, pipeline, latest, steps=steps)}."
    )


def _advice(name: str, pipeline: GPipe, latest: Sequence[Observation], *, steps: bool) -> str:
    """The gains of other settings, if the simulator explains the time of these mini-batches."""
    last = latest[-1]
    alike = [x for x in latest if (x.schedule, x.inline) == (last.schedule, last.inline)]
    times = {key: median(each.times[key] for each in alike) for key in last.times}
    length, lag = (median(of_it) for of_it in zip(*((x.length, x.lag) for x in alike), strict=True))
    unknown = doubts(last.schedule, times, length, lag=lag, inline=last.inline)
    if unknown:
        return f"What other settings would bring is not known, for {unknown}"
    paths = [""] if len(pipeline.taken) == 1 else [taken.path for taken in pipeline.taken]
    k = paths.index(name)
    best = partial(best_balance, pipeline, k) if pipeline.profiles else None
    parts = None
    if pipeline.profiles and pipeline.profiles[k].split:
        parts = parts_of(pipeline.profiles[k], pipeline.balances[k])
    found = changes(
        last.schedule, times, last.busy, best, parts=parts, steps=steps, inline=last.inline
    )
    worth = [str(each) for each in found if each.gain > _WORTH]
    alone = " on one thread, where no schedule overlaps" if last.inline else ""
    return f"By simulation{alone}, " + (
        "; ".join(worth) if worth else f"no other setting would bring more than {_WORTH:.0%}"
    )
