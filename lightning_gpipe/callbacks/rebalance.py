"""Moves layers between devices during training, when another balance is faster.

A device that gets hot, or is shared, becomes slower: the timeline shows it, as all wait for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_gpipe.callbacks.running import check_positive, milliseconds, pipeline_of, strategy_of
from lightning_gpipe.core.balance import Place, Shift, recomputing, shift_for, time_costs
from lightning_gpipe.core.layout import outside_stage
from lightning_gpipe.core.pipeline import GPipe, memory_of
from lightning_gpipe.core.run import Observation, Timeline, typical

_MINI_BATCHES = 20  # the latest, of which the median is taken; reading one waits for GPUs


class Rebalance(Callback):
    """Moves layers between devices, between two epochs, if that makes the slowest stage faster.

    Example::

        Trainer(strategy=GPipeStrategy("time", chunks=8), callbacks=[Rebalance()], devices=4)

    The layers are measured once, at setup, as for ``balance="time"``. From then on the callback
    uses the times of the stages, which the pipeline measures anyway: their median over the latest
    mini-batches of an epoch. Gradients and optimizer state move with their layers. On the CPU the
    results stay equal to the bit, unless layers draw random numbers, or layers of several stages
    use the same parameter or tensor, see :meth:`~lightning_gpipe.GPipe.rebalance`. If the stages
    are slower after a move than before, it is undone. Replicas move the same layers, by the times
    of the first one.

    Args:
        every_n_epochs: The number of epochs between two comparisons.
        threshold: The share by which the slowest stage must get faster for a move: 0.1 is 10 %.

    Attributes:
        shifts: The moves so far, but for the moves back of those that were undone: the epoch
            before which each was made, and the shift of each pipelined module; of replicas, the
            first one's callback has them.

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
        self._timelines: deque[Timeline] = deque(maxlen=_MINI_BATCHES)
        self._chosen: list[Shift] = []  # the move that is being made
        self._latest: list[Shift] = []  # the latest move, until its gain is measured
        self._undone: set[tuple[tuple[int, ...], ...]] = set()

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        strategy = strategy_of(trainer, self)
        if stage == "fit":
            strategy.measure_layers()

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pipeline = pipeline_of(trainer, self)
        if pipeline.layout.spread:
            raise RuntimeError(
                "Rebalance moves layers between the devices of one process: got a pipeline over "
                "several. Leave it out, and resume from a checkpoint with another balance."
            )
        pipeline.observe(self._timelines.append)

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        epoch, strategy = trainer.current_epoch, strategy_of(trainer, self)
        if epoch % self.every_n_epochs == 0:
            compares = self._timelines and strategy.is_global_zero
            balances = strategy.broadcast(self._compare(trainer, epoch) if compares else [])
            moved, chosen, self._chosen = self._move(trainer, balances), self._chosen, []
            if moved and chosen:
                self.shifts.append((epoch, chosen))
                self._latest = chosen
        self._timelines.clear()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._timelines.clear()
        self._latest = []

    def _compare(self, trainer: Trainer, epoch: int) -> list[list[int]]:
        """Return the balances that are better than the present ones, or none."""
        pipeline = pipeline_of(trainer, self)
        busy = self._busy(pipeline)
        if busy is None:
            return []
        if self._latest and (before := self._better_before(busy)):
            return before
        try:
            shifts = [_best_balance(pipeline, k, times) for k, times in enumerate(busy)]
        except ValueError as error:  # nothing fits the memory
            rank_zero_warn(f"Rebalance keeps the balance: {error}")
            return []
        chosen = [shift if shift.gain > self.threshold else _stay(shift) for shift in shifts]
        if not any(shift.moved for shift in chosen) or _balances(chosen) in self._undone:
            return []
        rank_zero_info(_summary(epoch, chosen))
        self._chosen = chosen
        return [list(shift.after) for shift in chosen]

    def _busy(self, pipeline: GPipe) -> list[list[float]] | None:
        times = []
        for piped in pipeline.piped_modules:
            timelines = [x for x in self._timelines if x.layout is piped.pipeline.layout]
            observations = [x for x in map(Observation.of, timelines) if x is not None]
            if not observations:
                return None
            times.append(typical(observations)[piped.stages.start : piped.stages.stop])
        return times

    def _better_before(self, busy: Sequence[Sequence[float]]) -> list[list[int]]:
        """Print the gain of the latest move; return the balances before it if it was a loss."""
        before = sum(shift.measured for shift in self._latest)
        after = sum(map(max, busy))
        moved, self._latest = self._latest, []
        rank_zero_info(
            f"Rebalance: the slowest stage takes {milliseconds(after)} per mini-batch, and took "
            f"{milliseconds(before)} before the layers moved ({after / before - 1:+.0%})."
        )
        if after <= before:
            return []
        self._undone.add(_balances(moved))
        rank_zero_info("Rebalance: so they move back.")
        return [list(shift.before) for shift in moved]

    def _move(self, trainer: Trainer, balances: list[list[int]]) -> bool:
        if not balances:
            return False
        try:
            strategy_of(trainer, self).rebalance(balances if len(balances) > 1 else balances[0])
        except (RuntimeError, ValueError, TypeError) as error:
            rank_zero_warn(f"Rebalance keeps the balance: {error}")
            return False
        return True


def _best_balance(pipeline: GPipe, k: int, busy: Sequence[float]) -> Shift:
    """Return the best balance of module ``k`` by its ``busy`` times; ValueError if none fits."""
    profile, piped = pipeline.profiles[k], pipeline.piped_modules[k]
    layout, stages = piped.pipeline.layout, piped.stages
    placement = layout.placement[stages.start : stages.stop]
    places = [Place(memory=memory_of(layout.device_of(j))) for j in stages]
    outside = outside_stage(layout.around, layout.n)
    if outside in stages:
        place = places[outside - stages.start]
        places[outside - stages.start] = replace(place, taken=profile.around.held_bytes)
    places = recomputing(places, profile, piped.activation_checkpointing)
    return shift_for(time_costs(profile), pipeline.balances[k], busy, placement, places)


def _stay(shift: Shift) -> Shift:
    return replace(shift, after=shift.before, stages=(shift.measured,))


def _balances(shifts: Sequence[Shift]) -> tuple[tuple[int, ...], ...]:
    return tuple(shift.after for shift in shifts)


def _summary(epoch: int, shifts: Sequence[Shift]) -> str:
    moves = [
        f"balance={list(shift.before)} becomes {list(shift.after)}, {shift.moved} layers move; the "
        f"slowest stage takes {milliseconds(shift.measured)} per mini-batch, then "
        f"{milliseconds(shift.predicted)} ({-shift.gain:+.0%})"
        for shift in shifts
        if shift.moved
    ]
    return f"Rebalance before epoch {epoch}: {'; '.join(moves)}."
