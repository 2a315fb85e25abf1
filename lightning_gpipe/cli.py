"""A LightningCLI in which ``strategy: gpipe`` is registered."""

from __future__ import annotations

from lightning.pytorch.cli import ArgsType, LightningCLI


def main(args: ArgsType = None) -> LightningCLI:
    """Run a LightningCLI whose model and data are given by ``class_path``.

    Importing this package registers the strategy, so that ``strategy: gpipe`` works in a
    configuration without any code of the user's.

    Args:
        args: What to parse instead of the command line.
    """
    return LightningCLI(subclass_mode_model=True, subclass_mode_data=True, args=args)
