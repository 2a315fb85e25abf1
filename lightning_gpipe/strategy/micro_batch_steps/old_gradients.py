"""Drops the gradients of the previous step early.

Lightning's loop drops them after training_step and before backward. With a loss for each
micro-batch training_step has computed all new ones by then, so there would be two sets of
gradients. Where no user code can see it, the old ones are dropped before the step.
"""

from __future__ import annotations

import lightning as L
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden


def drop_old_gradients(module: L.LightningModule) -> None:
    """Drop the gradients that the loop would drop after training_step.

    They stay where accumulation goes on, or a hook or optimizer of the user's acts when they are
    dropped.
    """
    trainer = module.trainer
    if trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches:
        return
    observed = is_overridden("optimizer_zero_grad", module) or any(
        is_overridden("on_before_zero_grad", owner)
        for owner in (module, *trainer.callbacks)  # type: ignore[attr-defined]  # a connector sets it
    )
    zero_grad = torch.optim.Optimizer.zero_grad
    if not observed and all(type(each).zero_grad is zero_grad for each in trainer.optimizers):
        for optimizer in trainer.optimizers:
            optimizer.zero_grad()
