"""Drops the gradients of the step before early.

Lightning's loop drops them after training_step and before backward. With a loss for each
micro-batch training_step has computed all new ones by then, so there would be two sets of
gradients. Where no code of the user's can see it, the old ones go before the step.
"""

from __future__ import annotations

import lightning as L
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden


def drop_old_gradients(module: L.LightningModule) -> None:
    """Drop the gradients that the loop will drop after training_step, if nobody sees them go.

    That is if accumulation begins anew, and no hook or optimizer of the user's acts then.
    """
    trainer = module.trainer
    if trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches:
        return
    seen = is_overridden("optimizer_zero_grad", module) or any(
        is_overridden("on_before_zero_grad", each)
        for each in (module, *trainer.callbacks)  # type: ignore[attr-defined]  # a connector sets it
    )
    own = (type(each).zero_grad is torch.optim.Optimizer.zero_grad for each in trainer.optimizers)
    if not seen and all(own):
        for optimizer in trainer.optimizers:
            optimizer.zero_grad()
