"""Activation checkpointing: which micro-batches run forward again before their backward.

Recomputation trades a second forward for memory: a stage keeps only the inputs of a micro-batch
that is recomputed, so the activations of one such micro-batch are alive at a time. The *last*
micro-batch is the first in backward, so its activations live shortest, and keeping them costs
little: hence the default, ``"except_last"``.

The activations are dropped by freeing the graph after forward, not by running forward without
gradients: so both forwards use the same kernels and compute the same numbers.
"""

from __future__ import annotations

from typing import Literal

ActivationCheckpointing = Literal["always", "except_last", "never"] | int

_NAMES = ("always", "except_last", "never")


def check_activation_checkpointing(value: ActivationCheckpointing) -> None:
    """Refuse a value that is neither a known name nor a number of micro-batches."""
    choices = f"one of {', '.join(map(repr, _NAMES))}, or a number of micro-batches to recompute"
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise TypeError(f"activation_checkpointing must be {choices}: got {value!r}.")
    if isinstance(value, str) and value not in _NAMES:
        raise ValueError(f"activation_checkpointing must be {choices}: got {value!r}.")
    if isinstance(value, int) and value < 0:
        raise ValueError(f"activation_checkpointing must be {choices}, 0 or more: got {value}.")


def count_recomputed(value: ActivationCheckpointing, m: int) -> int:
    """Return how many of ``m`` micro-batches are recomputed; they are the first."""
    match value:
        case "always":
            return m
        case "except_last":
            return m - 1
        case "never":
            return 0
        case k:
            return min(k, m)
