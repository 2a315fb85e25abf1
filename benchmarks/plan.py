"""Claim: a plan says what a step takes, and what is saved for backward.

Three models, in two stages, run with three numbers of micro-batches, with and without
recomputation. The layers are measured one by one; the predicted time of forward and backward stands
beside the median of what they take by the timeline. Without recomputation the bytes that are
saved at the peak are compared with those that autograd's hooks see.

Times of two stages on two cores need a machine that nobody else uses.

    python -m benchmarks.plan
    python -m benchmarks.plan --models charlm --rounds 9

Predicted / measured must be between 0.85 and 1.15 for times, and between 0.90 and 1.10 for bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.balance import MODELS
from benchmarks.harness import Report, options
from lightning_gpipe import GPipe, plan

CHUNKS = (2, 4, 8)
MODES = ("never", "always")


class Saved:
    """The bytes that are saved for backward now, and at their peak; a storage counts once."""

    def __init__(self) -> None:
        self.peak = 0
        self._now = 0
        self._users: dict[int, int] = {}
        self._lock = threading.Lock()
        self._ignored: set[int] = set()

    def ignore(self, tensors: Iterator[Tensor]) -> None:
        """Do not count these, such as parameters."""
        self._ignored.update(each.untyped_storage()._cdata for each in tensors)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count in a ``with`` block."""
        with torch.autograd.graph.saved_tensors_hooks(lambda x: _Packed(self, x), _unpacked):
            yield

    def add(self, tensor: Tensor) -> int:
        """Count a tensor; returns what :meth:`drop` takes."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        with self._lock:
            self._users[key] = self._users.get(key, 0) + 1
            if self._users[key] == 1 and key not in self._ignored:
                self._now += storage.nbytes()
                self.peak = max(self.peak, self._now)
        return key

    def drop(self, key: int, size: int) -> None:
        """A tensor is saved no longer."""
        with self._lock:
            self._users[key] -= 1
            if not self._users[key] and key not in self._ignored:
                self._now -= size


class _Packed:
    """A saved tensor."""

    def __init__(self, saved: Saved, tensor: Tensor) -> None:
        self.tensor = tensor.detach()
        self._saved, self._size = saved, tensor.untyped_storage().nbytes()
        self._key = saved.add(tensor)

    def __del__(self) -> None:
        self._saved.drop(self._key, self._size)


def _unpacked(packed: _Packed) -> Tensor:
    return packed.tensor


def step(pipeline: GPipe, x: Tensor) -> float:
    """A mini-batch, forward and backward; the seconds in the pipeline, by its timeline."""
    pipeline.zero_grad()
    pipeline(x).square().mean().backward()
    assert pipeline.timeline is not None, "a mini-batch has run"
    phases: dict[int, list[Any]] = {}
    for span in pipeline.timeline.spans:
        phases.setdefault(pipeline.timeline.schedule.phase_of(span.action), []).append(span)
    return sum(
        max(span.end for span in phase) - min(span.start for span in phase)
        for phase in phases.values()
    )


def saved_bytes(pipeline: GPipe, x: Tensor) -> int:
    """The most bytes that are saved for backward at once, parameters and buffers left out."""
    saved = Saved()
    saved.ignore(iter([*pipeline.parameters(), *pipeline.buffers()]))
    with saved.counting():
        step(pipeline, x)
    return saved.peak


def compare(name: str, report: Report, rounds: int) -> None:
    """Add what was found for one model."""
    each = MODELS[name]()
    for chunks in CHUNKS:
        for mode in MODES:
            found = plan(
                each.model,
                each.x,
                2,
                stages=2,
                module=each.path,
                chunks=chunks,
                activation_checkpointing=mode,  # type: ignore[arg-type]  # a literal of MODES
            ).prediction
            balance = list(found.settings.balance)
            pipeline = GPipe(
                each.model,
                balance,
                module=each.path,
                devices=["cpu"] * 2,
                chunks=chunks,
                activation_checkpointing=mode,  # type: ignore[arg-type]  # a literal of MODES
            )
            step(pipeline, each.x)
            taken = median(step(pipeline, each.x) for _ in range(rounds))
            saved = saved_bytes(pipeline, each.x)
            pipeline.close()
            pipeline.release()
            kept = sum(stage.memory.activations for stage in found.stages)
            title = f"{name}, chunks={chunks}, {mode}"
            report.rows.append(
                (
                    title,
                    f"{1e3 * found.time:.1f}",
                    f"{1e3 * taken:.1f}",
                    f"{kept / 2**20:.1f}",
                    f"{saved / 2**20:.1f}",
                )
            )
            report.target(f"{title}: time", found.time / taken, at_least=0.85, at_most=1.15)
            if mode == "never":
                report.target(f"{title}: saved", kept / saved, at_least=0.9, at_most=1.1)


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    given = options("plan", __doc__, rounds=5, argv=argv, models="charlm,unet,resnet101")
    torch.set_num_threads(2)  # the two stages share them
    report = Report(
        given,
        "What a plan predicts of forward and backward in two stages, and what was measured",
        columns=("", "ms, plan", "ms", "MiB saved, plan", "MiB saved"),
    )
    for name in given.models.split(","):
        torch.manual_seed(0)
        compare(name, report, given.rounds)
    report.publish()


if __name__ == "__main__":
    main()
