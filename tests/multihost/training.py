"""What the machines run: a small fit that tells how far it is, and goes on from a checkpoint.

torchrun ... tests/multihost/training.py FOLDER per_stage
"""

import argparse
import faulthandler
import os
import random
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from lightning_gpipe import GPipeStrategy
from tests.support.lightning_modules import Classifier, Data, rows, six_layers, trainer

BATCHES = 6
EPOCHS = 4
BALANCE = [1, 2, 2, 1]


class Told(Callback):
    """Writes how many steps were made, and seeds each of them by its number."""

    def __init__(self, folder: Path, rank: str, pause: float) -> None:
        self._file = folder / f"steps-{rank}"
        self._pause = pause

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        torch.manual_seed(trainer.global_step)
        time.sleep(self._pause)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        with self._file.open("a", encoding="utf-8") as file:
            file.write(f"{trainer.global_step}\n")


class More(Data):
    """As many rows as are needed."""

    def train_dataloader(self) -> Any:
        return DataLoader(rows(7 * BATCHES, seed=1), batch_size=7)


def dropping() -> Classifier:
    """A model whose weights depend on each random number of each step."""
    layers = six_layers()
    layers[1] = nn.Sequential(nn.Tanh(), nn.Dropout(0.2))
    layers[3] = nn.Sequential(nn.Tanh(), nn.Dropout(0.2))
    return Classifier("adam", layers=layers)


def fit(
    folder: Path, processes: Any, *, bound: float = 30.0, pause: float = 0.0, rank: str = "0"
) -> None:
    """Train, from the last checkpoint on if there is one; the end is in ``end.ckpt``."""
    torch.manual_seed(0)
    random.seed(0)
    model = dropping()
    single = processes == "single"
    lost_after = None if single else timedelta(seconds=bound)
    strategy = GPipeStrategy(BALANCE, 3, processes=processes, lost_after=lost_after)
    made = trainer(
        folder,
        strategy,
        devices=4 if single else 2,
        num_nodes=1 if single else 2,
        max_epochs=EPOCHS,
        enable_checkpointing=True,
        callbacks=[Told(folder, rank, pause), ModelCheckpoint(folder, save_last=True)],
    )
    last = folder / "last.ckpt"
    made.fit(model, More(), ckpt_path=last if last.exists() else None)
    made.save_checkpoint(folder / "end.ckpt")


def main() -> None:
    """Train as the arguments say, and write what went wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("processes")
    parser.add_argument("--bound", type=float, default=30.0)
    parser.add_argument("--pause", type=float, default=0.0)
    options = parser.parse_args()
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    rank = os.environ["RANK"]
    (options.folder / f"process-{rank}").write_text(str(os.getpid()), encoding="utf-8")
    try:
        fit(
            options.folder,
            options.processes,
            bound=options.bound,
            pause=options.pause,
            rank=rank,
        )
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
        (options.folder / f"error-{rank}").write_text(text, encoding="utf-8")
        raise


if __name__ == "__main__":
    main()
