"""Runs calls on a few rows, to see what they return and how their arguments are cut.

Most arguments are cut as their shapes say. Where a shape allows several readings, each is tried on
a mini-batch of two rows: an attention mask of shape (rows, 1, length, length), given whole to two
rows, does not run; nor does a table of positions that happens to have as many entries as there are
rows, when it is cut. If several run and return the same, the argument has no influence. If they
return different things, nothing can tell which is meant, and the user must.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations, count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_gpipe.core.data import tree_flatten
from lightning_gpipe.core.faithful import add_note
from lightning_gpipe.core.frontends.module_list.arguments import (
    WHOLE,
    Arguments,
    Path,
    Reading,
    default_reading,
    other_reading,
)
from lightning_gpipe.core.frontends.module_list.calls import Call, Learned
from lightning_gpipe.core.frontends.module_list.effects import Undisturbed, copied, fingerprint
from lightning_gpipe.core.frontends.module_list.placeholder import Placeholder
from lightning_gpipe.core.frontends.module_list.results import Result, with_given
from lightning_gpipe.core.frontends.module_list.samples import few_of
from lightning_gpipe.core.plan import is_own

_MOST_FLIPPED = 2  # arguments that are read otherwise at a time, before all are


class Doubt(ValueError):
    """Raised for an argument that may be cut or not."""


class NotInRows(ValueError):
    """Raised for a call whose arguments have no rows in dim 0."""


class Try(NamedTuple):
    """What a call returned in a rehearsal."""

    result: Any
    filled: frozenset[Path]
    edited: frozenset[Path]  # tensors from outside


class Rehearsal:
    """One call that has not been seen before.

    Args:
        call: The call.
        given: What it is given.
        rows: The number of rows of the mini-batch.
        few: How many of them are tried; None for all, where nothing is cut.
        sample: What a placeholder is for these few rows.
    """

    def __init__(
        self,
        call: Call,
        given: Arguments,
        rows: int,
        few: int | None,
        sample: Callable[[Placeholder], Tensor],
    ) -> None:
        self._call = call
        self._given = given
        self._rows, self._few = rows, few
        self._sample = sample
        self._leaves = dict(given.leaves)
        self._objects = given.objects

    def learn(
        self, readings: Mapping[Path, Reading], unknown: Sequence[Path]
    ) -> tuple[Learned, Try]:
        """Run the call, and see what it returns.

        Args:
            readings: How the tensors from outside are cut, as far as it is known.
            unknown: Those of which it is not known.

        Raises:
            ValueError: If arguments have several readings that make a difference.
            BaseException: What the call raises in all of them, with a note.
        """
        tensors = {path: self._leaves[path] for path in unknown}
        first = {path: default_reading(x, self._rows) for path, x in tensors.items()}
        others = {path: other_reading(x, self._rows) for path, x in tensors.items()}
        try:
            found, settled = self._run({**readings, **first}), first
        except Exception as error:
            if not unknown:
                raise self._failure(error, readings) from error.__cause__
            found, settled = self._other_readings(readings, first, others, error)
        else:
            for path in unknown:
                settled[path] = self._settled({**readings, **settled}, path, others[path], found)
        result = Result.of(with_given(found.result, self._objects), self._few)
        return Learned(result, settled, found.filled), found

    def _other_readings(
        self,
        readings: Mapping[Path, Reading],
        first: Mapping[Path, Reading],
        others: Mapping[Path, Reading],
        error: Exception,
    ) -> tuple[Try, dict[Path, Reading]]:
        """The only other reading that runs."""
        for flipped in _flips(list(first)):
            run: list[tuple[Try, dict[Path, Reading]]] = []
            for paths in flipped:
                settled = {**first, **{path: others[path] for path in paths}}
                if (found := self._attempt({**readings, **settled})) is not None:
                    run.append((found, settled))
            if run and all(_equal(each.result, run[0][0].result) for each, _ in run):
                return run[0]
            if run:
                differing = [p for p in first if len({settled[p] for _, settled in run}) > 1]
                raise self._doubt(differing)
        raise self._failure(error, {**readings, **first}) from error.__cause__

    def _settled(
        self, readings: Mapping[Path, Reading], path: Path, other: Reading, found: Try
    ) -> Reading:
        """The reading of an argument, if the first one runs.

        Raises:
            Doubt: If the other one runs too, and makes a difference.
        """
        flipped = {**readings, path: other}
        again = self._attempt(flipped)
        if again is None or _equal(again.result, found.result):
            return readings[path]
        # One may run only because a block counts the rows of all its input together, as in
        # `x.view(rows, -1, width)`: not with a number of rows that does not divide it.
        few = _no_divisor(self._leaves[path].numel())
        first, second = self._attempt(readings, few), self._attempt(flipped, few)
        if first is not None and (second is None or _equal(first.result, second.result)):
            return readings[path]
        if first is None and second is not None:
            return other
        raise self._doubt([path])

    def _attempt(self, readings: Mapping[Path, Reading], few: int | None = None) -> Try | None:
        """What the call returns, or None if it raises an error."""
        try:
            return self._run(readings, few)
        except Exception:
            return None

    def _run(self, readings: Mapping[Path, Reading], few: int | None = None) -> Try:
        """Run the call on a few rows of everything; another number of them than usual, if given."""
        few = few or self._few
        device = self._call.device
        copies: dict[Path, tuple[Any, Any]] = {}

        def given(path: Path, leaf: Any) -> Any:
            if isinstance(leaf, Placeholder):
                made = self._sample(leaf)
                if few != self._few and self._few is not None:
                    made = few_of(made, leaf.leaf.reading or WHOLE, self._few, few)
                return made.to(device, copy=True)
            if isinstance(leaf, Tensor):
                made = few_of(leaf, readings[path], self._rows, few).to(device, copy=True)
            elif is_own(leaf):
                made = copied(leaf)
            else:
                return leaf
            copies[path] = made, fingerprint(made)
            return made

        with Undisturbed(self._call.modules, device):
            args, kwargs = self._given.replaced(given(*each) for each in self._given.leaves)
            result = self._call.run(*args, **kwargs)
            changed = [path for path, (x, before) in copies.items() if fingerprint(x) != before]
            objects = [(path, copies[path][0]) for path, _ in self._objects]
            result = with_given(result, objects)
        filled = frozenset(path for path, _ in self._objects if path in changed)
        return Try(result, filled, frozenset(changed) - filled)

    def _failure(self, error: Exception, readings: Mapping[Path, Reading]) -> Exception:
        """The error for a call that raises one: that with a note, unless its rows are the cause."""
        all_whole = dict.fromkeys(readings, WHOLE)
        placeholders = any(isinstance(leaf, Placeholder) for leaf in self._leaves.values())
        if self._few is None or placeholders or self._attempt(all_whole) is None:
            return self._noted(error, readings)
        cut = self._shapes_of(path for path, reading in readings.items() if reading != WHOLE)
        whole = self._shapes_of(path for path, reading in readings.items() if reading == WHOLE)
        return NotInRows(
            "the rows of what a block is called with must be in dim 0, so that it can be cut: "
            f"{self._call} runs on all {self._rows} rows, and on {self._few} of them it raises "
            f"{type(error).__name__}: {_first_line(error)}. Cut was {cut}; whole was "
            f"{whole or 'nothing'}. A model whose sequence comes before its rows cannot be cut in "
            "a loop over blocks. If one of these tensors has no rows, write whole(tensor), from "
            "lightning_gpipe."
        )

    def _shapes_of(self, paths: Iterable[Path]) -> str:
        found = [(self._call.titles([path]), tuple(self._leaves[path].shape)) for path in paths]
        return ", ".join(f"{name} {shape}" for name, shape in found if shape)

    def _noted(self, error: Exception, readings: Mapping[Path, Reading]) -> Exception:
        given = self._shapes_of(path for path, reading in readings.items() if reading == WHOLE)
        few = "" if self._few is None else f" on {self._few} of the {self._rows} rows"
        cut = f" What is given whole to every micro-batch: {given}." if given else ""
        add_note(
            error,
            f"raised when {self._call} was tried{few}, before it runs in micro-batches. The rows "
            f"of tensors must be in dim 0.{cut}",
        )
        return error

    def _doubt(self, paths: Sequence[Path]) -> Doubt:
        found = ", ".join(str(tuple(self._leaves[path].shape)) for path in paths)
        return Doubt(
            f"it must be clear whether the rows of an argument of {self._call} are those of the "
            f"mini-batch: got {self._call.titles(paths)} of shape {found} with {self._rows} rows, "
            "and both readings run, with different results. Write whole(tensor), from "
            "lightning_gpipe, for one that every micro-batch needs as a whole; give one with rows "
            "the number of rows, and nothing else, in dim 0."
        )


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "").rstrip(".")


def _flips(paths: list[Path]) -> Iterator[list[tuple[Path, ...]]]:
    """Which arguments to read otherwise: each alone, then pairs, then all."""
    for k in range(1, min(_MOST_FLIPPED, len(paths)) + 1):
        yield list(combinations(paths, k))
    if len(paths) > _MOST_FLIPPED:
        yield [tuple(paths)]


def _no_divisor(number: int) -> int:
    """The smallest number from 2 that does not divide ``number``."""
    return next(k for k in count(2) if number % k)


def _equal(one: Any, other: Any) -> bool:
    """Whether two results are the same."""
    (leaves, spec), (others, spec_of_other) = tree_flatten(one), tree_flatten(other)
    return spec == spec_of_other and all(map(_same, leaves, others))


def _same(one: Any, other: Any) -> bool:
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return one is other or (type(one) is type(other) and bool(one == other))
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not (one.dtype.is_floating_point or one.dtype.is_complex):
        return torch.equal(one, other)
    return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
