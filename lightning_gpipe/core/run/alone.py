"""A stage that runs by itself, outside of a mini-batch, to be measured."""

from __future__ import annotations

from collections.abc import Collection

import torch

from lightning_gpipe.core.faithful import Context, OwnGenerators, Randomness
from lightning_gpipe.core.plan import Program
from lightning_gpipe.core.run.participation import Participation
from lightning_gpipe.core.run.stage import Stage
from lightning_gpipe.core.run.stage_pass import StagePass
from lightning_gpipe.core.run.work import work_of


def pass_alone(
    stage: Stage,
    program: Program | None = None,
    *,
    recomputed: Collection[int] = (),
    split: bool = False,
) -> StagePass:
    """A pass through one stage, in the caller's thread-local state.

    Its shadows must be swapped in while it runs. It is never finished: statistics that it collects
    go nowhere.

    Args:
        stage: The stage.
        program: What the stages run, if that is not their layers.
        recomputed: The micro-batches whose activations are dropped.
        split: Whether backward leaves the gradients of the weights to an action of their own.
    """
    devices = {torch.device("cpu"), stage.device} - {torch.device("meta")}
    context = Context.capture(devices)
    shadows = stage.shadows(grad=context.grad, recomputed=bool(recomputed))
    return StagePass(
        stage,
        work_of(stage, program),
        context,
        frozenset(recomputed),
        Randomness(OwnGenerators(devices, None), None),
        shadows,
        Participation([shadows]),
        split=split,
    )
