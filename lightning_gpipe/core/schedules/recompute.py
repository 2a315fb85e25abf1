"""Activation checkpointing: which micro-batches run forward again before their backward.

A stage keeps only the inputs of a micro-batch that is recomputed, so the activations of one such
micro-batch are alive at a time. The *last* micro-batch is the first in backward, so keeping its
activations costs little: hence the default, ``"except_last"``. Stages need not recompute alike:
those that hold few micro-batches at once, or few bytes, may have room for all activations.

The activations are dropped by freeing the graph after forward, not by running forward without
gradients: so both forwards use the same kernels and compute the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from lightning_gpipe.core.schedules.placement import check_for_each_stage, is_number

ActivationCheckpointing = Literal["always", "except_last", "never"] | int | Sequence[int]

_NAMES = ("always", "except_last", "never")
_CHOICES = (
    f"one of {', '.join(map(repr, _NAMES))}, a number of micro-batches to recompute, 0 or more, or "
    "a list of such numbers, one for each stage"
)


def check_activation_checkpointing(
    value: ActivationCheckpointing, stages: int | None = None
) -> None:
    """Refuse what is no known name, number or list; a list also if it is not one for each stage."""
    if isinstance(value, str) and value in _NAMES:
        return
    listed = isinstance(value, list | tuple)
    numbers: list[Any] = list(value) if isinstance(value, list | tuple) else [value]
    if not isinstance(value, str) and not all(map(is_number, numbers)):
        raise TypeError(f"activation_checkpointing must be {_CHOICES}: got {value!r}.")
    if isinstance(value, str) or not numbers or min(numbers) < 0:
        raise ValueError(f"activation_checkpointing must be {_CHOICES}: got {value!r}.")
    if listed and stages is not None:
        check_for_each_stage("activation_checkpointing", numbers, stages)


def recomputed_by_stage(value: ActivationCheckpointing, m: int, n: int) -> tuple[int, ...]:
    """Return how many of ``m`` micro-batches each of ``n`` stages recomputes; they are the first.

    >>> recomputed_by_stage("except_last", m=4, n=2)
    (3, 3)
    >>> recomputed_by_stage([8, 1], m=4, n=2)
    (4, 1)
    """
    match value:
        case "always":
            return (m,) * n
        case "except_last":
            return (m - 1,) * n
        case "never":
            return (0,) * n
        case int(k):
            return (min(k, m),) * n
    return tuple(min(int(k), m) for k in value)


def held_at_once(m: int, k: int) -> int:
    """Return for how many of ``m`` micro-batches a stage that recomputes ``k`` holds activations.

    So many are alive at most in a schedule whose forwards all come first.
    """
    return max(m - k, min(1, k))
