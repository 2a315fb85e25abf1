"""A loss that is computed for some rows at a time.

The logits of a language model are its largest activations by far, and a sum over tokens needs few
of them at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite
from types import CodeType
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_gpipe.core.data.terms import has_mean

_SUMS: WeakSet[CodeType] = WeakSet()  # of functions whose losses were seen to add up


def loss_in_pieces(loss: Callable[..., Tensor], *tensors: Tensor, rows: int) -> Tensor:
    """Add up a loss over pieces of some rows, with the activations of one piece at a time.

    Each piece is computed once more in backward. The head of a language model and its loss, for
    1,024 tokens at a time::

        def of_tokens(hidden, targets):
            return F.cross_entropy(self.head(hidden), targets, reduction="sum")

        hidden, targets = self.layers(tokens).flatten(0, 1), targets.flatten()
        return loss_in_pieces(of_tokens, hidden, targets, rows=1024) / len(targets)

    Args:
        loss: Returns the loss of a piece, of shape ``()``: a sum over its rows, not a mean.
        tensors: Its arguments for all rows, each of shape ``(n, ...)``.
        rows: The number of rows in a piece; the last piece may have fewer.

    Returns:
        The sum, of shape ``()``. Value and gradients are those of ``loss(*tensors)``, up to the
        order of sums.

    Raises:
        ValueError: If the tensors have no rows or different numbers of them, ``rows`` is not
            positive, or the loss of a piece is not one number, or no sum: the first time that a
            function is given, its loss of two rows is compared with the sum of their losses.
    """
    counts = {len(tensor) if tensor.dim() else 0 for tensor in tensors}
    if len(counts) != 1 or counts == {0}:
        raise ValueError(
            "a loss in pieces needs tensors with the same number of rows: got shapes "
            f"{[tuple(tensor.shape) for tensor in tensors]}. Flatten them to a row for each term "
            "of the sum."
        )
    if rows < 1:
        raise ValueError(f"rows must be 1 or more, the rows of a piece: got {rows}.")
    if len(tensors[0]) > rows:
        _check_sum(loss, tensors)
    total: Tensor | None = None
    for piece in zip(*(tensor.split(rows) for tensor in tensors), strict=True):
        value = checkpoint(loss, *piece, use_reentrant=False)
        if not isinstance(value, Tensor) or value.dim():
            got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                "the loss of a piece must be one number, the sum over its rows: got "
                f"{f'shape {got}' if isinstance(got, tuple) else got}. Write reduction='sum'."
            )
        if len(tensors[0]) > rows and has_mean(value.grad_fn):
            raise _no_sum("a mean")
        total = value if total is None else total + value
    assert total is not None, "there are rows"
    return total


def _check_sum(loss: Callable[..., Tensor], tensors: Sequence[Tensor]) -> None:
    """Refuse a loss of two rows that is not the sum of their losses, if it draws no numbers."""
    code = getattr(loss, "__code__", None)
    if code in _SUMS:
        return
    gpus = sorted({tensor.device for tensor in tensors if tensor.is_cuda}, key=str)
    with torch.no_grad(), torch.random.fork_rng(gpus):
        states = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, gpus)]
        try:
            parts = [slice(2), slice(1), slice(1, 2)]
            values = [loss(*(tensor[rows] for tensor in tensors)) for rows in parts]
            both, one, other = map(float, values)
        except Exception:  # as of a batch norm, which takes no single row, or without values
            return
        drawn = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, gpus)]
    if not isinstance(values[0], Tensor) or not all(map(torch.equal, states, drawn)):
        return
    dtype = values[0].dtype
    exactness = torch.finfo(dtype).eps ** 0.5 if dtype.is_floating_point else 0.0
    if abs(both - one - other) > exactness * max(map(abs, (both, one, other))):
        found = f"{both:.6g} for the first two rows, and {one:.6g} and {other:.6g} for each of them"
        raise _no_sum(found)
    if code is not None and both and isfinite(both):  # not of rows that are left out
        _SUMS.add(code)


def _no_sum(found: str) -> ValueError:
    return ValueError(
        f"the loss of a piece must be a sum over its rows: got {found}. Write reduction='sum', "
        "divide what loss_in_pieces returns by the number of all rows, and add to it what is of no "
        "rows, such as a penalty on weights."
    )
