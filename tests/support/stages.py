"""One stage on the CPU, and passes through it."""

import torch
from torch import nn

from lightning_gpipe.core.faithful import Context, OwnGenerators, Randomness
from lightning_gpipe.core.plan import cut, lay_out
from lightning_gpipe.core.run.participation import Participation
from lightning_gpipe.core.run.stage import Stage
from lightning_gpipe.core.run.stage_pass import StagePass
from lightning_gpipe.core.run.work import Layers

CPU = torch.device("cpu")


def stage(*layers: nn.Module) -> Stage:
    """A stage of all these layers."""
    layout = lay_out(cut(nn.Sequential(*layers), [len(layers)]), [CPU])
    return Stage(layout, 0, deferred_batch_norm=True)


NONE: frozenset[int] = frozenset()
ALL = frozenset(range(8))


def begin(stage: Stage, recomputed: frozenset[int] = NONE) -> StagePass:
    """A new mini-batch's pass through the stage."""
    shadows = stage.shadows(grad=torch.is_grad_enabled(), recomputed=bool(recomputed))
    return StagePass(
        stage,
        Layers(stage),
        Context.capture([CPU]),
        recomputed,
        Randomness(OwnGenerators([CPU]), None),
        shadows,
        Participation([shadows]),
    )
