"""A LightningCLI in which the strategy is registered as ``gpipe``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.pytorch.cli import ArgsType, LightningCLI


def main(args: ArgsType = None) -> LightningCLI:
    """Run a LightningCLI whose model and data are given by ``class_path``.

    ``strategy: gpipe`` stands for the defaults. Options of the strategy need its class, in the
    configuration or as ``--trainer.strategy=lightning_gpipe.GPipeStrategy
    --trainer.strategy.chunks=2``. ``args`` None parses the command line.
    """
    return LightningCLI(subclass_mode_model=True, subclass_mode_data=True, args=args)


def fit_one_step(
    arguments: Sequence[str], cli: type[LightningCLI] = LightningCLI, **options: Any
) -> None:
    """Run a LightningCLI that trains and validates one batch of a configuration on the CPU."""
    cli(
        subclass_mode_model=True,
        subclass_mode_data=True,
        save_config_callback=None,
        seed_everything_default=0,
        args=[
            "fit",
            *arguments,
            "--trainer.accelerator=cpu",
            "--trainer.fast_dev_run=true",
            "--trainer.enable_progress_bar=false",
            "--trainer.enable_model_summary=false",
        ],
        **options,
    )
