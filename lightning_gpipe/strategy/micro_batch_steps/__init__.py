"""The training step of a LightningModule, called for each micro-batch instead of the batch.

The pipeline's engine runs the steps as coroutines. Lightning still gets what it expects of one
step: a result, values that are logged once, a loss that a gradient scaler may scale.
"""

from lightning_gpipe.strategy.micro_batch_steps.training import (
    MicroBatchSteps,
    check_schedule,
    checkpointing_for,
)

__all__ = [
    "MicroBatchSteps",
    "check_schedule",
    "checkpointing_for",
]
