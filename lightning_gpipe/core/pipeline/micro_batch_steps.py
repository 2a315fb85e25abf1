"""Runs a training step for each micro-batch: cuts the mini-batch, weights the losses."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_gpipe.core.data import Division, copy_marks, map_tensors, plain, tree_flatten
from lightning_gpipe.core.faithful import add_note
from lightning_gpipe.core.pipeline.pipeline import Pipeline
from lightning_gpipe.core.run import Losses, greenlets
from lightning_gpipe.core.schedules import (
    Block,
    ByMicroBatch,
    as_block,
    check_by_micro_batch,
    schedule_for,
)

_FILL_DRAIN = (
    "raised when the batch was cut for a loss for each micro-batch. If its parts have rows of "
    "their own, such as labelled and unlabelled ones, write schedule='fill_drain', which cuts only "
    "the input of the layers."
)

_WAITING = 100  # mini-batches, the first ones, whose losses are read where that waits for a GPU

StepSchedule = ByMicroBatch | Sequence[Sequence[int]]  # the user's, by its name or written out


class Outcome(NamedTuple):
    """The result of a training step.

    Attributes:
        loss: The weighted mean of the losses; its ``backward()`` hands over the gradients, which
            are computed already. None if the step returned None for every micro-batch.
        results: The values that the step returned for each micro-batch, detached.
        rows: The number of rows of each micro-batch; None if it is not known.
        weights: The weight of each micro-batch's loss: its rows, or the step's ``"loss_weight"``.
        merge: Merges tensors or lists among the results, with an entry per row, in their order.
    """

    loss: Tensor | None
    results: list[Any]
    rows: tuple[int, ...] | None
    weights: list[float]
    merge: Callable[[Sequence[Any]], Any]


class MicroBatchStepping:
    """Runs training steps by micro-batch; raises without such a schedule or without greenlet."""

    def __init__(self, pipeline: Pipeline, schedule: StepSchedule) -> None:
        own: ByMicroBatch | Block = schedule if isinstance(schedule, str) else as_block(schedule)
        check_by_micro_batch(own, pipeline.chunks, pipeline.layout.placement)
        greenlets()
        self._pipeline = pipeline
        self._schedule = own
        self._batches = 0

    def run(
        self,
        step: Callable[[Any], Any],
        batch: Any,
        *,
        modules: Iterable[nn.Module] = (),
        scale: float | Tensor = 1.0,
    ) -> Outcome:
        """Run ``step`` on each micro-batch of ``batch``, see :meth:`GPipe.by_micro_batch`."""
        if not torch.is_grad_enabled():
            raise RuntimeError(
                f"schedule={self._schedule!r} is for training: got a step without gradients. Call "
                "the model itself to evaluate."
            )
        pipeline = self._pipeline
        try:
            pieces = pipeline.microbatching.split(batch, pipeline.chunks)
        except ValueError as error:
            add_note(error, _FILL_DRAIN)
            raise
        if len(pieces) > 1:
            _refuse_uncut(batch, pipeline.microbatching.division([batch]))
        division = pipeline.microbatching.division(pieces)
        rows = None if division is None else division.sizes
        pieces = [map_tensors(_alias, piece) for piece in pieces]
        m = len(pieces)
        losses = Losses(m, rows, scale, read=self._read())
        schedule = schedule_for(
            self._schedule,
            m,
            pipeline.layout.placement,
            recomputed=pipeline.recomputed(m),
            split=pipeline.split_backward,
            starts=pipeline.layout.starts,
        )
        loss, results = pipeline.engine.run_code(
            lambda i: step(pieces[i]),
            schedule.with_gradients if pipeline.engine.sends_gradients else schedule,
            losses,
            modules,
            partial(pipeline.microbatching.division, pieces),
        )
        merge = partial(pipeline.microbatching.merge_results, batch=batch)
        results = [x if isinstance(x, Tensor) else plain(x) for x in results]
        return Outcome(loss, results, rows, losses.weights, merge)

    def _read(self) -> Collection[str]:
        """Return the types of devices on which what losses are means over is read."""
        self._batches += 1
        if not self._pipeline.reads_losses:
            return ()
        return ("cpu",) if self._batches > _WAITING else ("cpu", "cuda")

    @property
    def current(self) -> int:
        code = self._pipeline.engine.code
        if code is None or code.running is None:
            raise RuntimeError("a step must run for a micro-batch: none does.")
        return code.running


def _alias(piece: Tensor) -> Tensor:
    """Return an alias with its own version counter, so that edits of one piece are only its own."""
    if piece.requires_grad or piece.layout is not torch.strided:
        return piece
    return copy_marks(piece, piece.data)


def _refuse_uncut(tree: Any, division: Division | None) -> None:
    """Refuse a list with an entry per row whose tensors have none: each piece would get it all."""
    if isinstance(tree, Mapping):
        for value in tree.values():
            _refuse_uncut(value, division)
        return
    if not isinstance(tree, list | tuple) or division is None:
        return
    [rows] = division.sizes
    tensors = [leaf for leaf in tree_flatten(tree).leaves if isinstance(leaf, Tensor)]
    if len(tree) == rows > 1 and tensors and not any(x.dim() for x in tensors):
        raise ValueError(
            "a list with an entry per row must be cut with the rows: got one of "
            f"{len(tree)} entries with tensors for {rows} rows, of which every micro-batch would "
            "get all. Stack its tensors in the collate function."
        )
    for entry in tree:
        _refuse_uncut(entry, division)
