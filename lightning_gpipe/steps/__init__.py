"""The training step of a LightningModule, called for each micro-batch and not for the batch.

The pipeline's engine runs it as a coroutine. Here is what Lightning expects of one step all the
same: a result, values that were logged once, a loss that a gradient scaler may scale.
"""

from lightning_gpipe.steps.training import (
    FOLDED,
    Steps,
    check_schedule,
    checkpointing_for,
)

__all__ = ["FOLDED", "Steps", "check_schedule", "checkpointing_for"]
