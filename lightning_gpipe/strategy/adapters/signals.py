"""Signals to some processes, on which all act after the same batch.

Lightning's handlers act in the middle of a step, and broadcast or save, for which they wait for
processes that got no signal. Here a handler asks all processes, and each does at the end of a batch
what Lightning's would have done. A callback that saves on an error waits for the others, too, and
must not fail in place of the error if they do not come.
"""

from __future__ import annotations

import signal
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from lightning_gpipe.core.faithful import Journal
from lightning_gpipe.strategy.processes import Processes

_REQUESTS = {"SIGTERM": "_sigterm_notifier_fn", "requeue": "_slurm_sigusr_handler_fn"}


class Signals(Callback):
    """Lets all processes of a Trainer act together on signals and errors."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._callbacks: list[Callback] = []  # of the Trainer, this one among them

    def follow(self, trainer: Trainer, changes: Journal) -> None:
        groups, connector = self._processes.groups, trainer._signal_connector
        if groups is None:
            return
        self._callbacks = trainer.callbacks  # type: ignore[attr-defined]  # a connector sets it
        for request, handler in _REQUESTS.items():
            ask = partial(_ask, groups.lifeline.ask, request)
            changes.write([(vars(connector), handler, ask)])
        loop: Any = trainer.fit_loop.epoch_loop
        changes.write([(vars(loop), "_broadcast_sigterm_tensor", lambda: None)])  # in each step
        for each in self._callbacks:
            if type(each).on_exception is not Callback.on_exception:
                act = partial(_warn_on_failure, each.on_exception)
                changes.write([(vars(each), "on_exception", act)])
        self._callbacks.append(self)

    def release(self) -> None:
        if self in self._callbacks:
            self._callbacks.remove(self)
        self._callbacks = []

    @override
    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        assert self._processes.groups is not None, "they are connected"
        connector: Any = trainer._signal_connector
        for request in self._processes.groups.lifeline.end_step():
            if request == "SIGTERM":
                rank_zero_info("SIGTERM: all processes stop after this batch.")
                connector.received_sigterm = True
            else:
                type(connector)._slurm_sigusr_handler_fn(connector, signal.SIGUSR1, None)

    @override
    def on_validation_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if not self._processes.replicated:  # replicas may have other numbers of these batches
            self.on_train_batch_end(trainer)

    @override
    def on_test_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.on_validation_batch_end(trainer)


def _ask(ask: Callable[[str], None], request: str, *_: object) -> None:
    ask(request)


def _warn_on_failure(act: Callable[..., None], *args: Any) -> None:
    try:
        act(*args)
    except RuntimeError as error:
        warnings.warn(
            f"on_exception of a callback must not hide the error that it is called for: got "
            f"{type(error).__name__}: {error}",
            stacklevel=2,
        )
