"""Trains an example by its configuration."""

from collections.abc import Mapping
from pathlib import Path

import lightning as L

from lightning_gpipe import GPipeStrategy
from lightning_gpipe.commands.fit import main


def fit_by_cli(config: Path, folder: Path, options: Mapping[str, object]) -> L.Trainer:
    """Train as a pipeline on two devices, with these options, and log to a folder."""
    options = {"trainer.logger.init_args.save_dir": folder, **options}
    arguments = [f"--{name}={value}" for name, value in options.items()]
    trainer = main(["fit", f"--config={config}", *arguments]).trainer
    assert isinstance(trainer.strategy, GPipeStrategy)
    assert trainer.num_devices == 2
    return trainer
