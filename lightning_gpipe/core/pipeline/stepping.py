"""A training step micro-batch by micro-batch: the caller's code runs for each of them.

The engine runs code; here the mini-batch is cut for it, its losses are weighted, and what it
returns is put together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_gpipe.core.data import Division, copy_marks, map_tensors, tree_flatten
from lightning_gpipe.core.pipeline.pipeline import Pipeline
from lightning_gpipe.core.plan import (
    ByMicroBatch,
    by_micro_batch,
    check_by_micro_batch,
    count_recomputed,
)
from lightning_gpipe.core.run import Losses, greenlets


class Outcome(NamedTuple):
    """What a training step came to.

    Attributes:
        loss: The mean of the losses, weighted; its ``backward()`` hands over the gradients that
            are known by then. None if the step returned None for every micro-batch.
        results: What the step returned for each micro-batch, detached.
        rows: The number of rows of each micro-batch; None if that is not known.
    """

    loss: Tensor | None
    results: list[Any]
    rows: tuple[int, ...] | None = None


class Stepping:
    """Runs training steps on a pipeline, micro-batch by micro-batch.

    Args:
        pipeline: The pipeline.
        schedule: What runs when.

    Raises:
        ValueError: If there is no such schedule for the pipeline's layout and micro-batches.
        ModuleNotFoundError: If greenlet is not installed.
    """

    def __init__(self, pipeline: Pipeline, schedule: ByMicroBatch) -> None:
        check_by_micro_batch(schedule, pipeline.chunks, pipeline.layout.placement)
        if pipeline.layout.spread:
            raise ValueError(
                f"schedule={schedule!r} must run in one process: got a pipeline over several. "
                "Leave out owners, or write schedule='fill_drain'."
            )
        greenlets()
        self._pipeline = pipeline
        self._schedule = schedule

    def run(
        self,
        step: Callable[[Any], Any],
        batch: Any,
        *,
        around: Iterable[nn.Module] = (),
        scale: float | Tensor = 1.0,
    ) -> Outcome:
        """Run ``step`` on each micro-batch of ``batch``.

        Args:
            step: Given a micro-batch, calls the pipeline once, and returns its loss.
            batch: The mini-batch; any pytree.
            around: Modules whose parameters the step may use, with those of the pipeline.
            scale: What gradients are multiplied by while they are computed.
        """
        if not torch.is_grad_enabled():
            raise RuntimeError(
                f"schedule={self._schedule!r} is for training: got a step without gradients. Call "
                "the model itself to evaluate."
            )
        pipeline = self._pipeline
        pieces = pipeline.microbatching.split(batch, pipeline.chunks)
        if len(pieces) > 1:
            _refuse_uncut(batch, pipeline.microbatching.division([batch]))
        division = pipeline.microbatching.division(pieces)
        rows = None if division is None else division.sizes
        pieces = [map_tensors(_apart, piece) for piece in pieces]
        m = len(pieces)
        inside = {module for stage in pipeline.stages for module in stage.modules}
        loss, results = pipeline.engine.run_code(
            lambda i: step(pieces[i]),
            by_micro_batch(
                self._schedule,
                m,
                pipeline.layout.placement,
                recomputed=count_recomputed(pipeline.activation_checkpointing, m),
                split=pipeline.split_backward,
            ),
            Losses(m, rows, scale),
            list(dict.fromkeys(each for each in around if each not in inside)),
            partial(pipeline.microbatching.division, pieces),
        )
        return Outcome(loss, results, rows)

    @property
    def current(self) -> int:
        """The micro-batch whose step runs."""
        code = self._pipeline.engine.code
        if code is None or code.running is None:
            raise RuntimeError("a step must run for a micro-batch: none does.")
        return code.running


def _apart(piece: Tensor) -> Tensor:
    """The same elements, whose edits in place autograd does not take for edits of other pieces."""
    if piece.requires_grad or piece.layout is not torch.strided:
        return piece
    return copy_marks(piece, piece.data)


def _refuse_uncut(tree: Any, division: Division | None) -> None:
    """Refuse lists with as many entries as rows that every micro-batch would get as a whole.

    Raises:
        ValueError: If there is one with tensors, none of which has rows.
    """
    if isinstance(tree, Mapping):
        for each in tree.values():
            _refuse_uncut(each, division)
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
    for each in tree:
        _refuse_uncut(each, division)
