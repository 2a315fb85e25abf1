"""Whether a loss for each micro-batch makes the loss of the batch.

The mean of the losses of micro-batches, weighted by rows, is the loss of the batch where that is a
mean over rows. A sum over rows, a mean over tokens of which some are padding, or a loss that
compares rows with one another raise no error: they train something else.

So a step runs on one batch both ways: on all of it, where the layers run as by fill-drain, and for
each micro-batch. Its loss and the gradients of all parameters are compared. What the layers compute
is verified in the first of these runs, as :func:`~lightning_gpipe.verify` does it, and reported
apart: then what is left is due to the loss. As there, dropouts are disabled, a known reason for a
difference is said, and afterwards the state is restored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from lightning_gpipe.core.pipeline import GPipe
from lightning_gpipe.core.plan import ByMicroBatch
from lightning_gpipe.core.verify.compare import beyond, deviations
from lightning_gpipe.core.verify.difference import WORDS, Difference
from lightning_gpipe.core.verify.parity import Parity
from lightning_gpipe.core.verify.rounding import AMPLIFIED
from lightning_gpipe.core.verify.step_parity import KINDS, LOSS, LossParity, StepParity
from lightning_gpipe.core.verify.step_runs import StepRun, StepRuns
from lightning_gpipe.core.verify.values import Values

_WORDS = WORDS | {LOSS: "the loss{}"}


def verify_step(
    pipeline: GPipe,
    step: Callable[[Any], Any],
    batch: Any,
    *,
    schedule: ByMicroBatch = "1f1b",
    around: nn.Module | None = None,
    scale: float | Tensor = 1.0,
    tolerance: float | None = None,
) -> StepParity | None:
    """Compare a step on a batch with the same for each micro-batch, before it is trained so.

    Example::

        parity = verify_step(model, step, (x, y), schedule="1f1b", around=head)
        parity.check()  # raises RuntimeError if the loss is no mean over rows
        outcome = model.by_micro_batch(step, (x, y), schedule="1f1b", around=head)

    Buffers, attributes of modules, generators, ``.grad`` and the pipeline are the same afterwards.
    What the step changes elsewhere is not undone: it runs for the whole batch and for each
    micro-batch, and up to two more times for the whole batch if there is a difference. That needs
    the memory of a forward and backward of the whole batch.

    Args:
        pipeline: The pipeline.
        step: As for :meth:`~lightning_gpipe.GPipe.by_micro_batch`.
        batch: A batch.
        schedule: As for :meth:`~lightning_gpipe.GPipe.by_micro_batch`.
        around: A module with all that the step uses around the model; None if there is nothing.
        scale: What gradients are multiplied by while they are computed.
        tolerance: As for :func:`~lightning_gpipe.verify`.

    Returns:
        What was compared, of the layers and of the loss; None if the step skips the batch.
    """
    runs = StepRuns(pipeline, step, batch, schedule, around, scale)
    layers: list[Parity] = []
    with pipeline.engine.exclusive(), runs.prepared():
        pieces = runs.by_micro_batch()
        if not pieces.losses:
            return None
        whole = runs.whole(layers=layers)
        allowed = runs.tolerance_for(whole) if tolerance is None else tolerance
        summed = _is_sum(whole, pieces, allowed)
        difference = _first_beyond(whole.values, pieces.values, allowed)
        unrepeatable = None
        if difference is not None:
            unrepeatable = _first_beyond(whole.values, runs.whole().values, allowed)
            reason = None if summed else runs.reason(whole, pieces)
            difference = replace(difference, reason=reason)
        if difference is not None and difference.reason is None and unrepeatable is None:
            perturbed = runs.whole(perturbed=True).values
            left = _first_beyond(whole.values, pieces.values, allowed, perturbed)
            difference = left or replace(difference, reason=AMPLIFIED)
    compared = {kind: deviations(whole.values[kind], pieces.values[kind]) for kind in KINDS}
    loss = LossParity(
        len(pieces.losses),
        compared,
        allowed,
        difference,
        unrepeatable,
        summed=summed,
        weighted=pieces.weighted,
    )
    return StepParity(tuple(layers), loss)


def _first_beyond(
    whole: Mapping[str, Values],
    pieces: Mapping[str, Values],
    allowed: float,
    perturbed: Mapping[str, Values] | None = None,
) -> Difference | None:
    """The first value that differs by more than rounding."""
    for kind in KINDS:
        moved = None if perturbed is None else perturbed[kind]
        if found := beyond(whole[kind], pieces[kind], allowed, moved):
            value = _WORDS[kind].format(found[0].name)
            return Difference(kind, found[0], None, range(0), value, None)
    return None


def _is_sum(whole: StepRun, pieces: StepRun, allowed: float) -> bool:
    """Whether the loss of the batch is the sum of those of the micro-batches."""
    [loss] = whole.losses
    return abs(sum(pieces.losses) - loss) <= allowed * abs(loss)
