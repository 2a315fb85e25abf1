"""Tells in one run of a call which of its arguments have rows.

A block computes each row of its output from that row of its arguments. So it is run on copies of
one row, each of which differs from the first in one argument::

    row     x      mask      memory
    0       x[0]   mask[0]   memory[0]
    1       x[0]   mask[0]   memory[0]    the same: what differs in the output does so by chance
    2       x[0]   altered   memory[0]    where row 2 of the output differs, the mask has rows
    3       x[0]   mask[0]   altered      where row 3 differs, the memory has

An output that does not differ shows nothing. The argument may have no influence on it, or be a
table of which every row needs all.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_gpipe.core.data import tree_flatten
from lightning_gpipe.core.faithful import NOTHING, Manager
from lightning_gpipe.core.frontends.module_list.arguments import WHOLE, Path, Reading

_SAME = 2  # rows that do not differ
_LARGE = 0.1  # of the largest number: what masks have for infinity
_INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
_TIMES = 10  # what differs by less than so often the difference by chance, does not


class Altered:
    """Copies of one row that differ in one argument each.

    Args:
        tensors: The tensors from outside of which it is not known how they are cut.
        readings: How they are cut here.
        rows: The number of rows of the mini-batch.

    Attributes:
        count: The number of copies: another one than ``rows``, and none that a block could divide
            the entries of a tensor by that is given whole.
    """

    def __init__(
        self, tensors: Mapping[Path, Tensor], readings: Mapping[Path, Reading], rows: int
    ) -> None:
        cut = [path for path in tensors if readings[path] != WHOLE]
        whole = [x.numel() for path, x in tensors.items() if readings[path] == WHOLE]
        self._row_of = {path: row for row, path in enumerate(cut, start=_SAME)}
        self.count = next(
            n
            for n in count(_SAME + len(cut))
            if n != rows and all(numel % n for numel in whole if numel)
        )

    def copies(self, path: Path, row: Tensor) -> Tensor:
        """The copies of what one row has of an argument, and of another value in one of them.

        Args:
            path: Where the argument is.
            row: Its entries for the row.
        """
        made = row.repeat(self.count, *[1] * (row.dim() - 1))
        if path in self._row_of:
            made.unflatten(0, (self.count, -1))[self._row_of[path]] = _another(row)
        return made

    def shown(self, path: Path, result: Any) -> bool:
        """Whether the result shows how a tensor is cut.

        Args:
            path: Where the tensor is. A row of the result that differs shows that it has rows. One
                that is given whole, to a number of rows that have no part in it, has none if
                the results of equal rows are equal.
            result: What the call returned.
        """
        leaves = (x for x in tree_flatten(result).leaves if isinstance(x, Tensor) and x.numel())
        rows = [
            x.unflatten(0, (self.count, -1))
            for x in leaves
            if x.dim() and not x.size(0) % self.count
        ]
        if path not in self._row_of:
            return bool(rows) and not any(_differs(x[1], x[0]) for x in rows)
        row = self._row_of[path]
        return any(_differs(x[row], x[0], float(_apart(x[1], x[0]).max())) for x in rows)


def equal_draws() -> Manager:
    """A ``with`` block in which no dropout is applied, and all rows draw the same numbers."""
    # Before about torch 2.9, a function given to torch.compile is never compiled once it has run in
    # a dispatch mode. There rows differ by what they draw, which shows nothing.
    known = hasattr(TorchDispatchMode, "ignore_compile_internals")
    return _EqualDraws() if known else NOTHING


class _EqualDraws(TorchDispatchMode):
    """Makes the rows of all that is drawn the same."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let ``torch.compile`` ignore the mode while it compiles, not when its code runs."""
        return True

    def __init__(self) -> None:
        self.supports_higher_order_operators = True
        super().__init__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
            return func(*args, **kwargs)
        names = [argument.name for argument in func._schema.arguments]
        dropout = "p" if func is torch.ops.aten.native_dropout.default else "dropout_p"
        if dropout in names:
            k = names.index(dropout)
            if k < len(args):
                return func(*args[:k], 0.0, *args[k + 1 :], **kwargs)
            return func(*args, **{**kwargs, dropout: 0.0})
        drawn = func(*args, **kwargs)
        for each in tree_flatten(drawn).leaves:
            if isinstance(each, Tensor) and each.dim() and each.size(0) > 1:
                each.copy_(each[:1].clone())
            if isinstance(each, Tensor) and "bernoulli" in func.name():
                each.fill_(1)  # what is dropped would hide a difference
        return drawn


def _another(row: Tensor) -> Tensor:
    """Values that are as valid as those of a row, and others where that is possible."""
    # To attend to half of the keys is not like attending to all of them, or none.
    half = (torch.arange(row.numel(), device=row.device) % 2 == 0).view_as(row)
    if row.dtype == torch.bool:
        return row ^ half
    if row.dtype.is_floating_point or row.dtype.is_complex:
        generator = torch.Generator().manual_seed(0)
        wide = torch.complex64 if row.dtype.is_complex else torch.float32
        noise = torch.randn(row.shape, generator=generator, dtype=wide).to(row.device)
        return (row.to(torch.promote_types(wide, _wide(row))) + noise).to(row.dtype)
    if row.dtype not in _INTEGERS:
        return row
    # Indices must stay within the tables that they are for.
    turned = row.flatten().roll(1).view_as(row)
    return turned if not torch.equal(turned, row) else torch.where(half & (row > 0), row - 1, row)


def _wide(x: Tensor) -> torch.dtype:
    """A type that has all values of a tensor, and can be computed with."""
    if x.dtype.is_complex:
        return torch.complex128
    return torch.float64


def _differs(one: Tensor, other: Tensor, by_chance: float = 0.0) -> bool:
    """Whether two rows differ by more than rounding, and than rows that are the same."""
    allowed = _rounding(other) + _TIMES * by_chance
    return bool((_apart(one, other) > allowed).any())


def _apart(one: Tensor, other: Tensor) -> Tensor:
    a, b = one.to(_wide(one)), other.to(_wide(other))
    same = (a == b) | (a.isnan() & b.isnan())
    return (a - b).abs().nan_to_num(nan=torch.inf).masked_fill(same, 0.0)


def _rounding(x: Tensor) -> float:
    """By how much the entries of a tensor may differ if they are computed in another order."""
    if not (x.dtype.is_floating_point or x.dtype.is_complex):
        return 0.0
    limits, sizes = torch.finfo(x.dtype), x.to(_wide(x)).abs()
    sizes = sizes[sizes < _LARGE * limits.max]
    return limits.eps**0.5 * float(sizes.max()) if sizes.numel() else 0.0
