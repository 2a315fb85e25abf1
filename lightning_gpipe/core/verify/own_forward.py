"""Compares what programs compute with what the model's own forward does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from itertools import chain
from typing import Any

from lightning_gpipe.core.verify.compare import Deviation, beyond, same_shapes, tolerance_of
from lightning_gpipe.core.verify.difference import WORDS, Difference
from lightning_gpipe.core.verify.values import BUFFERS, GRADIENTS, INPUT_GRADIENTS, OUTPUT, Values
from lightning_gpipe.core.verify.whole import (
    Calls,
    Ran,
    Whole,
    beside,
    in_one_piece,
    own_forward,
    run_call,
)

_DRAWS = "the forward draws random numbers, of which a pipeline has others"


def differs_from_forward(
    whole: Whole,
    call: Callable[..., Any],
    args: Any,
    kwargs: Any,
    calls: Calls,
    tolerance: float | None,
    preserved: Callable[[], AbstractContextManager[None]],
) -> tuple[Difference | None, bool]:
    """The first value of the pipelines, with mini-batches in one piece, that the forward has not.

    Args:
        whole: What is called.
        call: Calls it.
        args, kwargs: What with.
        calls: The calls of layers in the programs.
        tolerance: The largest relative deviation that counts as rounding; None takes one by type.
        preserved: Makes a ``with`` block at whose end the state is as before.

    Returns:
        The difference, if there is one, and whether the forward repeats what it computes.
    """
    with preserved(), in_one_piece(whole), calls.recorded() as piped:
        ran = run_call(whole, call, args, kwargs)
    with preserved(), own_forward(whole), calls.recorded() as plain:
        own = run_call(whole, partial(beside, whole, call), args, kwargs, ran)
    allowed = _tolerance(whole, own) if tolerance is None else tolerance
    found = _first(own.values, ran.values, allowed)
    if found is None:
        return None, True
    with preserved(), own_forward(whole):
        again = run_call(whole, partial(beside, whole, call), args, kwargs, ran)
    repeats = _first(own.values, again.values, allowed) is None
    kind, deviation = found
    value = WORDS[kind].format(deviation.name)
    if kind == OUTPUT:
        for title, before, after in calls.pairs(plain, piped):
            if same_shapes(before, after) and (differing := beyond(before, after, allowed)):
                value, deviation = f"the output of {title}", differing[0]
                break
    reason = _DRAWS if own.drew else None
    return Difference(kind, deviation, None, range(0), value, reason), repeats


def _first(
    plain: Mapping[str, Values], piped: Mapping[str, Values], allowed: float
) -> tuple[str, Deviation] | None:
    for kind in (OUTPUT, GRADIENTS, BUFFERS, INPUT_GRADIENTS):
        if differing := beyond(plain[kind], piped[kind], allowed):
            return kind, differing[0]
    return None


def _tolerance(whole: Whole, own: Ran) -> float:
    values = chain.from_iterable(group.values() for group in own.values.values())
    dtypes = {x.dtype for x in (*whole.parameters(), *values) if x is not None}
    on_cuda = any(device.type == "cuda" for device in whole.devices)
    return tolerance_of(dtypes, on_cuda=on_cuda)
