"""A pass through one stage alone, outside of a mini-batch, for measurements."""

from __future__ import annotations

from collections.abc import Collection

import torch

from lightning_gpipe.core.faithful import Context, Randomness
from lightning_gpipe.core.programs import Program
from lightning_gpipe.core.run.backward.leaves import UsedLeaves
from lightning_gpipe.core.run.stage import Stage
from lightning_gpipe.core.run.stage_pass import StagePass
from lightning_gpipe.core.run.work import Work


def pass_alone(
    stage: Stage,
    program: Program,
    *,
    recomputed: Collection[int] = (),
    split: bool = False,
) -> StagePass:
    """Return a pass through one stage, in the caller's thread-local state.

    Its shadows must be swapped in while it runs. Its statistics are never committed. ``recomputed``
    has the micro-batches whose activations are dropped; with ``split`` backward leaves the
    gradients of the weights to an action of their own.
    """
    devices = {torch.device("cpu"), stage.device} - {torch.device("meta")}
    context = Context.capture(devices)
    shadows = stage.shadows(grad=context.grad, recomputed=bool(recomputed))
    return StagePass(
        stage,
        Work(stage, program),
        context,
        frozenset(recomputed),
        Randomness(devices),
        shadows,
        UsedLeaves([shadows]),
        split=split,
    )
