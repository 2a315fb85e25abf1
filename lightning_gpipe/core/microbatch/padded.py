"""Padded sequences, each micro-batch trimmed to its own longest.

A batch of sequences is padded to its longest, so most of a micro-batch may be padding that every
stage computes for nothing. When the sequences are put in order of their length before they are cut,
those of a micro-batch are nearly as long as one another, and all but the first become shorter::

    the batch, padded    in order       micro-batches, trimmed

    ####----             ########       ########    ####    ###
    ########             #####---       #####---    ###-    ##-
    ##------             ####----
    #####---             ###-----
    ###-----             ###-----
    ###-----             ##------
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from lightning_gpipe.core.microbatch import MicroBatching
from lightning_gpipe.core.microbatch.rows import Rows, has_rows
from lightning_gpipe.core.pytree import Flat, entries, flatten, unflatten

_EVERYWHERE = None  # in the place of a list of entries


class PaddedSequences(MicroBatching):
    """Trims the sequences of each micro-batch to its longest, and pads the outputs back.

    The layers must give padding no influence on the rest, by masks or by lengths: what is trimmed
    is not there any more. The caller sees neither the trimming nor the order: outputs come back
    with the batch's rows in their places, and padded to its length.

    Example::

        strategy = GPipeStrategy(
            microbatching=PaddedSequences("lengths", trimmed=["tokens"], padded=True)
        )
        ...
        logits = self.layers({"tokens": tokens, "lengths": lengths})  # (rows, longest, classes)

    Args:
        lengths: The entry of the batch that holds each row's length, integers of shape ``(rows,)``.
            An entry is the key of a dict, the index in a tuple or list, or the field of a
            dataclass.
        trimmed: The entries with tensors of shape ``(rows, longest, ...)``, to trim in dim 1.
        padded: The entries of the output to pad back in dim 1; True for all of it, False for none.
        value: What to pad outputs with.
        sort: Whether to cut the rows in order of their length, the longest first.

    Raises:
        TypeError: If ``trimmed`` is no list of entries, or ``padded`` neither that nor a bool.
    """

    def __init__(
        self,
        lengths: str | int,
        *,
        trimmed: list[str | int],
        padded: bool | list[str | int],
        value: float = 0.0,
        sort: bool = True,
    ) -> None:
        if not isinstance(trimmed, list) or not trimmed:
            raise TypeError(
                f"trimmed must list the entries of the batch to trim: got {trimmed!r}. Write "
                'trimmed=["tokens"], say.'
            )
        if not isinstance(padded, bool | list):
            raise TypeError(
                f"padded must be True, False or the entries of the output to pad: got {padded!r}."
            )
        self._lengths = lengths
        self._trimmed = trimmed
        self._padded = _EVERYWHERE if padded is True else padded or []
        self._value = value
        self._sort = sort
        self._rows = Rows()

    @override
    def split(self, batch: Any, chunks: int) -> list[Any]:
        """Cut ``batch`` as :class:`~lightning_gpipe.core.microbatch.rows.Rows` does, and trim.

        Reads the lengths, which waits for their device.

        Raises:
            ValueError: If an entry is missing, or the lengths do not fit the batch.
        """
        self._rows.split(batch, 1)  # to reorder tensors of other numbers of rows would drop some
        order = self._order(batch)
        lengths = iter(order.lengths)
        trimmed = []
        for microbatch in self._rows.split(_changed(batch, order.arrange), chunks):
            own = [next(lengths) for _ in range(self._lengths_in(microbatch).size(0))]
            longest = max(own, default=order.longest)
            trim = partial(torch.narrow, dim=1, start=0, length=max(longest, 1))
            trimmed.append(_changed(microbatch, trim, self._trimmed))
        return trimmed

    @override
    def merge(self, outputs: Sequence[Any], batch: Any) -> Any:
        """Pad the outputs to the length of ``batch``, and put their rows back in its order.

        Raises:
            ValueError: If an entry is missing, or an output has other rows than the batch.
        """
        order = self._order(batch)
        pad = partial(_padded, longest=order.longest, value=self._value)
        merged = self._rows.merge(
            [_changed(output, pad, self._padded) for output in outputs], batch
        )
        leaves, spec = flatten(merged)
        per_row = map(has_rows, flatten(outputs[0]).leaves)  # the others were stacked
        restored = [
            order.restore(leaf) if rows else leaf
            for leaf, rows in zip(leaves, per_row, strict=True)
        ]
        return unflatten(Flat(restored, spec))

    def _order(self, batch: Any) -> _Order:
        lengths = self._lengths_in(batch)
        longest = self._longest_in(batch)
        known = lengths.tolist()
        if known and not 0 <= min(known) <= max(known) <= longest:
            raise ValueError(
                f"lengths must be between 0 and the padded length: got {min(known)}..{max(known)} "
                f"in {self._lengths!r} for sequences padded to {longest} in {self._trimmed}."
            )
        if not self._sort:
            return _Order(known, longest, None)
        order = sorted(range(len(known)), key=lambda k: -known[k])
        return _Order([known[k] for k in order], longest, torch.tensor(order, device="cpu"))

    def _lengths_in(self, batch: Any) -> Tensor:
        found = _at(batch, self._lengths)
        if len(found) != 1 or found[0].dim() != 1 or found[0].is_floating_point():
            raise ValueError(
                f"the entry {self._lengths!r} of the batch must be a tensor of integers of shape "
                f"(rows,), the lengths: got {_shapes(found)}. The entries are {_names(batch)}."
            )
        return found[0]

    def _longest_in(self, batch: Any) -> int:
        found = {entry: _at(batch, entry) for entry in self._trimmed}
        longest = {x.size(1) if x.dim() > 1 else -1 for tensors in found.values() for x in tensors}
        if len(longest) != 1 or -1 in longest or not all(found.values()):
            shapes = {entry: _shapes(tensors) for entry, tensors in found.items()}
            raise ValueError(
                f"the entries {self._trimmed} of the batch must be tensors of one padded length, "
                f"(rows, longest, ...): got {shapes}. The entries are {_names(batch)}."
            )
        return longest.pop()


@dataclass(frozen=True)
class _Order:
    """The rows of a batch in the order in which they are cut.

    Attributes:
        lengths: How long each row is, in this order.
        longest: The length that all are padded to.
        order: For each place the row that comes there, or None for the batch's own order.
    """

    lengths: list[int]
    longest: int
    order: Tensor | None

    def arrange(self, tensor: Tensor) -> Tensor:
        """The rows of ``tensor`` in this order."""
        return tensor if self.order is None else tensor[self.order.to(tensor.device)]

    def restore(self, tensor: Tensor) -> Tensor:
        """The rows of ``tensor``, which are in this order, in that of the batch."""
        if self.order is None:
            return tensor
        if tensor.size(0) != len(self.lengths):
            raise ValueError(
                f"outputs must have the {len(self.lengths)} rows of the batch, to be put back in "
                f"their places: got shape {tuple(tensor.shape)}. Write sort=False if the layers "
                "change the number of rows."
            )
        return tensor[self.order.argsort().to(tensor.device)]


def _padded(tensor: Tensor, longest: int, value: float) -> Tensor:
    if tensor.dim() < 2 or tensor.size(1) > longest:
        raise ValueError(
            f"outputs to pad must have the shape (rows, up to {longest}, ...): got "
            f"{tuple(tensor.shape)}. Name the entries that have it, or write padded=False."
        )
    missing = longest - tensor.size(1)
    return F.pad(tensor, [0, 0] * (tensor.dim() - 2) + [0, missing], value=value)


def _changed(
    tree: Any, function: Callable[[Tensor], Tensor], where: list[str | int] | None = _EVERYWHERE
) -> Any:
    """The tree with ``function`` applied to the tensors with rows, in these entries or all."""
    leaves, spec = flatten(tree)
    names = entries(tree)
    if missing := [entry for entry in where or [] if entry not in names]:
        raise ValueError(f"the entries {missing} must be in the output: it has {_names(tree)}.")
    changed = [
        function(leaf) if (where is _EVERYWHERE or name in where) and has_rows(leaf) else leaf
        for leaf, name in zip(leaves, names, strict=True)
    ]
    return unflatten(Flat(changed, spec))


def _at(tree: Any, entry: str | int) -> list[Tensor]:
    """The tensors in an entry."""
    leaves = zip(flatten(tree).leaves, entries(tree), strict=True)
    return [leaf for leaf, name in leaves if name == entry and isinstance(leaf, Tensor)]


def _names(tree: Any) -> list[str | int | None]:
    return list(dict.fromkeys(entries(tree)))


def _shapes(tensors: list[Tensor]) -> list[tuple[int, ...]]:
    return [tuple(tensor.shape) for tensor in tensors]
