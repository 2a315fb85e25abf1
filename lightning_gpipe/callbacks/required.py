"""Checks and formats that the callbacks share."""

from __future__ import annotations

from lightning.pytorch import Trainer

from lightning_gpipe.core.pipeline import GPipe
from lightning_gpipe.strategy import GPipeStrategy


def strategy_of(trainer: Trainer, callback: object) -> GPipeStrategy:
    """Return the Trainer's strategy, or raise a TypeError if it makes no pipeline."""
    strategy = trainer.strategy
    if isinstance(strategy, GPipeStrategy):
        return strategy
    raise TypeError(
        f"{type(callback).__name__} is for a pipeline: got a Trainer with "
        f"{type(strategy).__name__}. Write Trainer(strategy=GPipeStrategy(...)), or leave out the "
        "callback."
    )


def pipeline_of(trainer: Trainer, callback: object) -> GPipe:
    """Return the pipeline of a Trainer that has been set up."""
    pipeline = strategy_of(trainer, callback).pipeline
    assert pipeline is not None, "there is one from setup to teardown"
    return pipeline


def check_positive(name: str, value: object) -> None:
    """Raise unless the argument is a whole number of 1 or more."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number: got {value!r}.")
    if value < 1:
        raise ValueError(f"{name} must be 1 or more: got {value}.")


def milliseconds(seconds: float) -> str:
    """Format a time to three digits, such as ``2.41 ms`` or ``1,260 ms``."""
    number = 1e3 * seconds
    return f"{number:,.0f} ms" if number >= 100 else f"{number:.3g} ms"
