"""Acts of a process of a Trainer, that all processes must do together."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch

from tests.support.lightning_modules import Data

Act = Callable[[L.Trainer], None]


def run_the_model(trainer: L.Trainer) -> None:
    """Run a sample, as for a picture that is logged."""
    with torch.no_grad():
        trainer.lightning_module(next(iter(Data().train_dataloader()))[0])


def take_a_batch(trainer: L.Trainer) -> None:
    loader: Any = trainer.train_dataloader
    next(iter(loader))


def save(trainer: L.Trainer) -> None:
    trainer.save_checkpoint(Path(trainer.default_root_dir) / "own.ckpt")


def meet(trainer: L.Trainer) -> None:
    trainer.strategy.barrier("talk")


def reduce(trainer: L.Trainer) -> None:
    trainer.strategy.reduce(torch.ones(()))


def gather(trainer: L.Trainer) -> None:
    trainer.lightning_module.all_gather(torch.ones(3))
