"""The errors for what a user's forward cannot do between two blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_gpipe.core.frontends.module_list import operators


class Refused(RuntimeError):
    """Raised for what cannot be recorded."""


def needs_value(func: Callable[..., Any], line: str) -> Refused:
    """The error for an operator that needs the value of a placeholder."""
    return Refused(
        "between two blocks of a pipeline, the values that they return are not known: got "
        f"{operators.title(func)} at {line}, which needs one. Do this in a block, where it runs "
        "for each micro-batch, or after the last block."
    )


def refused_operator(func: Callable[..., Any], line: str, why: str) -> Refused:
    """The error for an operator that cannot run in micro-batches."""
    if why == operators.NEEDS_VALUE:
        return needs_value(func, line)
    return Refused(
        "what the forward does between two blocks must work for each micro-batch in its stage: "
        f"{operators.title(func)} at {line} {why}. Do this in a block, or after the last one."
    )


def other_state(changed: str, line: str) -> Refused:
    """The error for a thread whose state is another one than when the forward began.

    Args:
        changed: What differs.
        line: The line that found it.
    """
    return Refused(
        "all blocks of a pipeline run in the same state of the thread: at "
        f"{line} it changes {changed}. Set it around the whole model, or within a block. A "
        "torch.utils.checkpoint around blocks is not needed, since the pipeline has "
        "activation_checkpointing: leave it out, or write use_reentrant=False."
    )
