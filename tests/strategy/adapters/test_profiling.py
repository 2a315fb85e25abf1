"""Profilers of Lightning and PyTorch show what the stages do, each action by its name.

Here are also the tests of the strategy with callbacks that monitor.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ThroughputMonitor
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import PyTorchProfiler, SimpleProfiler
from torch import Tensor, nn
from torch.profiler import ProfilerAction

from lightning_gpipe import GPipeStrategy
from tests.support.lightning_modules import (
    Classifier,
    assert_same_weights,
    fitted,
    six_layers,
    trainer,
)

STEPS, CHUNKS = 3 * 3, 3  # three epochs of three batches


def strategy() -> GPipeStrategy:
    return GPipeStrategy([2, 4], chunks=CHUNKS, threads=True)


def expected(training: int, evaluations: int = 0) -> dict[str, int]:
    """How often each stage does what, in so many steps of each kind."""
    steps = {
        "forward": CHUNKS * (training + evaluations),
        "recompute": (CHUNKS - 1) * training,
        "backward": CHUNKS * training,
    }
    return {f"stage {j} {verb}": n for j in range(2) for verb, n in steps.items()}


def of_stages(found: dict[str, int]) -> dict[str, int]:
    prefix = "[GPipe]"
    return {k.removeprefix(prefix): n for k, n in found.items() if k.startswith(prefix)}


def test_simple_profiler_has_a_row_for_each_stage_and_kind(tmp_path: Path) -> None:
    profiler = SimpleProfiler()

    pipelined = fitted(tmp_path, strategy(), devices=2, profiler=profiler, limit_val_batches=0)

    counts = {name: len(times) for name, times in profiler.recorded_durations.items()}
    assert of_stages(counts) == expected(STEPS)
    assert all(t > 0 for times in profiler.recorded_durations.values() for t in times)
    assert "[GPipe]stage 1 backward" in profiler.summary()
    assert_same_weights(pipelined, fitted(tmp_path))


def test_evaluations_are_in_the_rows(tmp_path: Path) -> None:
    profiler = SimpleProfiler()

    fitted(tmp_path, strategy(), devices=2, profiler=profiler, num_sanity_val_steps=0)

    counts = {name: len(times) for name, times in profiler.recorded_durations.items()}
    # Batches of 5 and 4 rows, which three micro-batches have.
    assert of_stages(counts) == expected(STEPS, evaluations=3 * 2)


def test_rows_end_with_the_fit(tmp_path: Path) -> None:
    """A second fit with the same profiler, without a pipeline, adds none."""
    profiler = SimpleProfiler()
    fitted(tmp_path, strategy(), devices=2, profiler=profiler, max_steps=1, limit_val_batches=0)

    fitted(tmp_path, profiler=profiler, max_steps=1)

    counts = {name: len(times) for name, times in profiler.recorded_durations.items()}
    assert of_stages(counts) == expected(1)


def trace(folder: Path) -> list[dict[str, Any]]:
    (path,) = folder.glob("*.pt.trace.json")
    found: list[dict[str, Any]] = json.loads(path.read_text("utf-8"))["traceEvents"]
    return found


def once(step: int) -> ProfilerAction:
    """A schedule: from the end of the first training_step to that of the second."""
    return ProfilerAction.RECORD_AND_SAVE if step == 1 else ProfilerAction.NONE


def test_pytorch_profiler_shows_actions_by_name(tmp_path: Path) -> None:
    profiler = PyTorchProfiler(dirpath=tmp_path, filename="fit", schedule=once, acc_events=True)

    fitted(tmp_path, strategy(), devices=2, profiler=profiler, max_steps=2, limit_val_batches=0)

    events = trace(tmp_path)
    actions = [event for event in events if str(event.get("name", "")).startswith("stage ")]
    assert Counter(event["name"] for event in actions) == {
        **{f"stage {j} forward {i}": 1 for j in range(2) for i in range(CHUNKS)},
        **{f"stage {j} recompute {i}": 1 for j in range(2) for i in range(CHUNKS - 1)},
        **{f"stage {j} backward {i}": 1 for j in range(2) for i in range(CHUNKS)},
    }
    threads = {(event["name"].split()[1], event["tid"]) for event in actions}
    assert len(threads) == len({tid for _, tid in threads}) == 2, "each stage has a thread"


def test_options_of_the_profiler_are_left_as_they_were(tmp_path: Path) -> None:
    profiler = PyTorchProfiler(dirpath=tmp_path, schedule=once, acc_events=True)
    before = dict(profiler._profiler_kwargs)

    fitted(tmp_path, strategy(), devices=2, profiler=profiler, max_steps=2)

    assert profiler._profiler_kwargs == before


class Broken(Classifier):
    """Fails in the step that is recorded, in a stage."""

    def __init__(self) -> None:
        super().__init__(layers=nn.Sequential(*six_layers(), Breaks()).double())


class Breaks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self._calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self._calls += 1
        if self._calls > CHUNKS:
            raise ArithmeticError("a layer's own error")
        return x


def test_profiler_ends_with_a_fit_that_fails(tmp_path: Path) -> None:
    """It recorded all threads until it was deleted, and crashed another thread's operator then."""
    profiler = PyTorchProfiler(dirpath=tmp_path, schedule=once, acc_events=True)

    with pytest.raises(ArithmeticError):
        fitted(
            tmp_path,
            GPipeStrategy([2, 5], chunks=CHUNKS, activation_checkpointing="never"),
            build=Broken,
            devices=2,
            profiler=profiler,
            limit_val_batches=0,
        )

    assert profiler.profiler is None
    assert not torch.autograd.profiler._is_profiler_enabled
    assert any(event["name"] == "stage 0 backward 0" for event in trace(tmp_path))


def test_use_of_the_devices_is_of_all(tmp_path: Path) -> None:
    """ThroughputMonitor's ``mfu`` took the pipeline for one device."""

    class Known(ThroughputMonitor):
        def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
            super().setup(trainer, pl_module, stage)
            self.available_flops = 1000

    class Counted(Classifier):
        flops_per_batch = 50

    monitor = Known(batch_size_fn=lambda batch: len(batch[0]))
    options: dict[str, Any] = {"callbacks": [monitor], "logger": CSVLogger(tmp_path)}

    fitted(tmp_path, strategy(), build=Counted, devices=2, max_steps=1, **options)

    assert {each.available_flops for each in monitor._throughputs.values()} == {2000}


def test_connection_before_there_is_a_trainer(tmp_path: Path) -> None:
    """Once it raised that the model is not attached to a Trainer; Lightning's strategies do not."""
    profiler = PyTorchProfiler(tmp_path)
    made = trainer(tmp_path, strategy(), devices=2, profiler=profiler)
    model = Classifier()

    made.strategy.connect(model)
    assert made.strategy.lightning_module is model
    model.trainer = made
    made.strategy.setup_environment()

    assert "experimental_config" in profiler._profiler_kwargs, "it records all threads"
    made.strategy.teardown()
    assert "experimental_config" not in profiler._profiler_kwargs
