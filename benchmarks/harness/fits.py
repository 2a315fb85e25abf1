"""Fits of a Trainer that are timed in turns.

Each runs on a thread of its own, and stops after every batch until it is resumed; the time to wake
it does not count.
"""

from __future__ import annotations

import logging
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from benchmarks.harness.contest import Contestant


class _Repeated(IterableDataset[Any]):
    """The same batches in turns, for ever."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from self._batches


def for_ever(*batches: Any) -> DataLoader[Any]:
    """The same batches in turns, for ever."""
    return DataLoader(_Repeated(batches), batch_size=None)


class Fit(Callback):
    """A fit on a thread of its own, which stops after every batch until it is resumed."""

    def __init__(
        self, model: L.LightningModule, strategy: Strategy | str, threads: int, devices: int
    ) -> None:
        self._model, self._threads, self._devices = model, threads, devices
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._error: BaseException | None = None
        self._begun = self._seconds = 0.0
        self._thread = threading.Thread(target=self._run, args=(strategy,), daemon=True)
        self._trainer: L.Trainer | None = None

    def begin(self) -> None:
        """Fit up to the first batch."""
        self._thread.start()
        self._wait()

    def step(self) -> float:
        """Fit one batch, and tell how many seconds it took."""
        self._go.release()
        self._wait()
        return self._seconds

    def end(self) -> None:
        """Leave it after the batch that was the last."""
        if self._trainer is not None:
            self._trainer.should_stop = True
        self._go.release()
        self._thread.join()

    def contestant(self, name: str) -> Contestant:
        """Who does one batch in each step."""

        def gradients() -> list[Tensor]:
            self.step()
            return [each.grad for each in self._model.parameters() if each.grad is not None]

        return Contestant(name, self.step, gradients)

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._pause()

    @override
    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self._seconds = time.perf_counter() - self._begun
        self._pause()

    def _pause(self) -> None:
        self._done.release()
        self._go.acquire()
        self._begun = time.perf_counter()

    def _run(self, strategy: Strategy | str) -> None:
        torch.set_num_threads(self._threads)
        try:
            self._trainer = L.Trainer(
                accelerator="cpu",
                devices=self._devices,
                strategy=strategy,
                max_epochs=-1,
                callbacks=[self],
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
            self._trainer.fit(self._model)
        except BaseException as error:
            self._error = error
        finally:
            self._done.release()

    def _wait(self) -> None:
        self._done.acquire()
        if self._error is not None:
            raise self._error


@contextmanager
def fitting(
    model: L.LightningModule, strategy: Strategy | str, threads: int, devices: int = 1
) -> Iterator[Fit]:
    """A fit for the duration of a ``with`` block."""
    fit = Fit(model, strategy, threads, devices)
    fit.begin()
    try:
        yield fit
    finally:
        fit.end()


@contextmanager
def quiet() -> Iterator[None]:
    """Leave out what Lightning says of every Trainer."""
    log = logging.getLogger("lightning.pytorch")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*does not have many workers")
            warnings.filterwarnings("ignore", r".*isinstance\(treespec, LeafSpec\)", FutureWarning)
            yield
    finally:
        log.setLevel(before)
