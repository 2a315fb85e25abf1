"""A script that trains over two processes: ``METHOD FILE PLACE``.

The second process stops in the second step, or saves alone after the fit; before that, its number
goes into the file. A main process that only waits for both is interrupted then.
"""

import os
import signal
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback

import __main__
from lightning_gpipe import GPipeStrategy
from tests.support.lightning_modules import Classifier, Data, trainer
from tests.support.waiting import awaited


class Stop(Callback):
    """Stops the second process in the second step."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if (trainer.global_rank, trainer.global_step) == (1, 1):
            note(self._file)
            os.kill(os.getpid(), signal.SIGSTOP)


def note(file: Path) -> None:
    file.write_text(str(os.getpid()), encoding="utf-8")


def main(method: Any, file: Path, place: str) -> None:
    """Fit with processes that are started so."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
    if method != "popen":
        threading.Thread(target=interrupt, args=(file,), daemon=True).start()
    strategy = GPipeStrategy(
        [2, 4],
        3,
        processes="per_stage",
        start_method=method,
        lost_after=timedelta(seconds=6),  # ten times as long to start
    )
    callbacks = [Stop(file)] if place == "step" else []
    made = trainer(file.parent, strategy, devices=2, callbacks=callbacks)
    made.fit(Classifier(), datamodule=Data())
    if made.global_rank == 1:
        note(file)
        made.save_checkpoint(file.with_suffix(".ckpt"))


def run(method: str, file: str, place: str) -> None:
    """In a process that was forked: what the script does that others are started with."""
    __main__.__spec__ = None
    sys.argv = [__file__, method, file, place]
    main(method, Path(file), place)


def interrupt(file: Path) -> None:
    awaited(file.exists, True)
    os.kill(os.getpid(), signal.SIGINT)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
