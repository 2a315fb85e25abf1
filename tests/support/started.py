"""A script that trains over two processes: ``python -m tests.support.started METHOD FILE``.

The weights of all stages, as the main process has them after the fit, go into the file.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from typing_extensions import override

from lightning_gpipe import GPipeStrategy
from tests.support.lightning_modules import Classifier, Data, fitted, weights


class Drawing(Classifier):
    """Keeps what it draws as the training begins: the random states of its process."""

    drawn: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("drawn", torch.zeros(2))

    @override
    def on_train_start(self) -> None:
        self.drawn.copy_(torch.rand(2))


def main(method: str, file: Path) -> None:
    """Fit with processes that are started so, and save the weights."""
    torch.set_num_threads(1)
    strategy = GPipeStrategy([2, 4], 3, processes="per_stage", start_method=method)  # type: ignore[arg-type]  # of a command line
    made = fitted(file.parent, strategy, build=Drawing, devices=2)
    if method == "popen":  # each process runs the script, and has its own stages
        made.save_checkpoint(file)
        return
    torch.save({"state_dict": weights(made)}, file)
    (metrics,) = made.test(made.lightning_module, datamodule=Data(), verbose=False)
    assert metrics["test_loss"] > 0, "a second start, with the trained weights, has results"


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
