"""A loss that is computed for some rows at a time.

The logits of a language model are its largest activations by far: a number for each token and each
word of the vocabulary, and as many gradients. A sum over tokens needs few of them at the same time.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.utils.checkpoint import checkpoint


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
            positive, or the loss of a piece is not one number.
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
    total: Tensor | None = None
    for piece in zip(*(tensor.split(rows) for tensor in tensors), strict=True):
        value = checkpoint(loss, *piece, use_reentrant=False)
        if not isinstance(value, Tensor) or value.dim():
            got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                "the loss of a piece must be one number, the sum over its rows: got "
                f"{f'shape {got}' if isinstance(got, tuple) else got}. Write reduction='sum'."
            )
        total = value if total is None else total + value
    assert total is not None, "there are rows"
    return total
