"""Plugins and profilers, in use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import profilers
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO, TorchCheckpointIO

from tests.lightning.features.callbacks import saved
from tests.lightning.features.run import Case, Run


class Own(TorchCheckpointIO):
    """Writes in a way of the user's own."""

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        torch.save(checkpoint, path)
        Path(f"{path}.seen").touch()


def saving(io: Any) -> Any:
    """The options of a Trainer that saves by a new plugin.

    It keeps all: a file may be removed before another thread has written it.
    """
    return lambda root: {
        "plugins": [io()],
        "callbacks": [ModelCheckpoint(root, "{epoch}", save_top_k=-1)],
    }


def seen(run: Run) -> Any:
    """What was saved, and whether the user's own way saw it."""
    return saved(run), [path.name for path in run.root.glob("*.seen")]


def profiling(kind: Any) -> Any:
    """The options of a Trainer with a new profiler that writes to a file."""
    return lambda root: {"profiler": kind(dirpath=root, filename="profile")}


def actions(run: Run) -> list[str]:
    """The actions that a SimpleProfiler timed, but for those of the strategy, by its name."""
    profiler: Any = run.trainer.profiler  # type: ignore[attr-defined]  # set by a connector
    return sorted(
        f"{name} {len(times)}"
        for name, times in profiler.recorded_durations.items()
        if not name.startswith(("[Strategy]", "[GPipe", "stage"))
    )


def reported(run: Run) -> list[str]:
    """The files of a profiler."""
    return sorted(path.name for path in run.root.glob("*profile*.txt"))


class OwnProfiler(profilers.Profiler):
    """A profiler of the user's own: the names of what began."""

    def __init__(self, dirpath: Any, filename: Any) -> None:
        super().__init__(dirpath, filename)
        self.recorded_durations: dict[str, list[int]] = {}

    def start(self, action_name: str) -> None:
        self.recorded_durations.setdefault(action_name, []).append(1)

    def stop(self, action_name: str) -> None:
        pass


CASES: dict[str, Case] = {
    "CheckpointIO": Case(saving(Own), seen),
    "TorchCheckpointIO": Case(saving(TorchCheckpointIO), saved),
    "AsyncCheckpointIO": Case(saving(AsyncCheckpointIO), saved),
    "Profiler": Case(profiling(OwnProfiler), actions),
    "PassThroughProfiler": Case(
        lambda root: {"profiler": profilers.PassThroughProfiler()},
        lambda run: type(run.trainer.profiler).__name__,  # type: ignore[attr-defined]  # set by a connector
    ),
    "SimpleProfiler": Case(profiling(profilers.SimpleProfiler), actions),
    "AdvancedProfiler": Case(profiling(profilers.AdvancedProfiler), reported),
}
