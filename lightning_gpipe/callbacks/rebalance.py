"""Moves layers between devices while a model trains, when another balance is faster.

A balance is found before the training, for devices as they were then. A device that gets hot, or
that another user needs too, is slower, and from then on all others wait for it. The timeline shows
it: its stage takes longer than its layers were measured to.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_gpipe.callbacks.best_balance import best_balance
from lightning_gpipe.callbacks.required import (
    check_positive,
    milliseconds,
    pipeline_of,
    strategy_of,
)
from lightning_gpipe.core.pipeline import GPipe
from lightning_gpipe.core.plan import Shift
from lightning_gpipe.core.run import Observation, Timeline, typical

_MINI_BATCHES = 20  # so many of the latest are averaged; reading one waits for GPUs


class Rebalance(Callback):
    """Moves layers between devices, between two epochs, when the slowest stage gets faster by it.

    Example::

        Trainer(strategy=GPipeStrategy("time", chunks=8), callbacks=[Rebalance()], devices=4)

    The layers are measured once, at setup, as for ``balance="time"``. From then on the times of the
    stages count, as the pipeline measures them anyway, the median of the latest mini-batches of an
    epoch. Moved layers take their gradients and the state of the optimizer along. What is computed
    does not change by a bit on the CPU, unless layers draw random numbers, or layers of several
    stages use the same parameter or tensor, see :meth:`~lightning_gpipe.GPipe.rebalance`. If the
    stages are slower after a move than before, it is undone.

    Args:
        every_n_epochs: After how many epochs to compare.
        threshold: By what share the slowest stage must get faster for a move: 0.1 are 10 %.

    Attributes:
        shifts: The moves so far, by the epoch before which they were made; for each pipeline.

    Raises:
        TypeError, ValueError: If an argument has the wrong type or an impossible value.
    """

    def __init__(self, every_n_epochs: int = 1, threshold: float = 0.1) -> None:
        check_positive("every_n_epochs", every_n_epochs)
        if isinstance(threshold, bool) or not isinstance(threshold, int | float):
            raise TypeError(f"threshold must be a number: got {threshold!r}.")
        if not 0 < threshold < 1:
            raise ValueError(
                "threshold must be between 0 and 1, the share by which the slowest stage gets "
                f"faster: got {threshold}. Write 0.1 for 10 %."
            )
        self.every_n_epochs, self.threshold = every_n_epochs, threshold
        self.shifts: list[tuple[int, list[Shift]]] = []
        self._seen: deque[Timeline] = deque(maxlen=_MINI_BATCHES)
        self._handle: Any = None
        self._awaited: list[Shift] = []  # the latest move, until it is known what it brought
        self._undone: set[tuple[tuple[int, ...], ...]] = set()

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        strategy = strategy_of(trainer, self)
        if stage == "fit":
            strategy.measure_layers()

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pipeline = pipeline_of(trainer, self)
        if pipeline.layout.spread or strategy_of(trainer, self).is_distributed:
            raise RuntimeError(
                "Rebalance moves layers between the devices of one process: got a pipeline over "
                "several, or replicas. Leave it out, and resume from a checkpoint with another "
                "balance."
            )
        self._handle = pipeline.observe(self._seen.append)

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        epoch = trainer.current_epoch
        if self._seen and epoch % self.every_n_epochs == 0:
            self._compare(trainer, epoch)
        self._seen.clear()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._handle is not None:
            self._handle.remove()
        self._handle = None
        self._seen.clear()
        self._awaited = []

    def _compare(self, trainer: Trainer, epoch: int) -> None:
        """Compare the balance with the best one, and move layers if that pays."""
        pipeline = pipeline_of(trainer, self)
        busy = self._busy(pipeline)
        if busy is None:
            return
        if self._awaited and self._was_worse(trainer, busy):
            return
        try:
            shifts = [best_balance(pipeline, k, times) for k, times in enumerate(busy)]
        except ValueError as error:  # nothing fits the memory
            rank_zero_warn(f"Rebalance keeps the balance: {error}")
            return
        chosen = [each if each.gain > self.threshold else _stay(each) for each in shifts]
        if any(each.moved for each in chosen) and _balances(chosen) not in self._undone:
            rank_zero_info(_said(epoch, chosen))
            if self._move(trainer, [each.after for each in chosen]):
                self.shifts.append((epoch, chosen))
                self._awaited = chosen

    def _busy(self, pipeline: GPipe) -> list[list[float]] | None:
        """The time that each stage of each pipeline takes; None if one has not run."""
        found = []
        for layout in pipeline.layouts:
            of_it = [Observation.of(each) for each in self._seen if each.layout is layout]
            whole = [each for each in of_it if each is not None]
            if not whole:
                return None
            found.append(typical(whole))
        return found

    def _was_worse(self, trainer: Trainer, busy: Sequence[Sequence[float]]) -> bool:
        """Tell what the latest move has brought, and undo it if that is a loss."""
        before = sum(each.measured for each in self._awaited)
        after = sum(map(max, busy))
        moved, self._awaited = self._awaited, []
        rank_zero_info(
            f"Rebalance: the slowest stage takes {milliseconds(after)} per mini-batch, and took "
            f"{milliseconds(before)} before the layers moved ({after / before - 1:+.0%})."
        )
        if after <= before:
            return False
        self._undone.add(_balances(moved))
        rank_zero_info("Rebalance: so they move back.")
        return self._move(trainer, [each.before for each in moved])

    def _move(self, trainer: Trainer, balances: Sequence[Sequence[int]]) -> bool:
        """Move layers; if that cannot be now, warn."""
        lists = list(map(list, balances))
        try:
            strategy_of(trainer, self).rebalance(lists if len(lists) > 1 else lists[0])
        except (RuntimeError, ValueError, TypeError) as error:
            rank_zero_warn(f"Rebalance keeps the balance: {error}")
            return False
        return True


def _stay(shift: Shift) -> Shift:
    return replace(shift, after=shift.before, stages=(shift.measured,))


def _balances(shifts: Sequence[Shift]) -> tuple[tuple[int, ...], ...]:
    return tuple(each.after for each in shifts)


def _said(epoch: int, shifts: Sequence[Shift]) -> str:
    """What moves, for the user."""
    moves = [
        f"balance={list(each.before)} becomes {list(each.after)}, {each.moved} layers move; the "
        f"slowest stage takes {milliseconds(each.measured)} per mini-batch, then "
        f"{milliseconds(each.predicted)} ({-each.gain:+.0%})"
        for each in shifts
        if each.moved
    ]
    return f"Rebalance before epoch {epoch}: {'; '.join(moves)}."
