"""Runs calls on a few rows, to see what they return and how their arguments are cut.

Most arguments are cut as their shapes say. Where shapes allow several readings, one run shows which
are right of all arguments together: see :mod:`.evidence`. If it shows nothing of an argument, the
other reading is tried too: an attention mask of shape (rows, 1, length, length), given whole to two
rows, does not run; nor does a table of positions that happens to have as many entries as there are
rows, when it is cut. If both run and return the same, the argument has no influence. If they
return different things, nothing can tell which is meant, and the user must.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations, count
from typing import Any, NamedTuple

from torch import Tensor

from lightning_gpipe.core.faithful import NOTHING, add_note
from lightning_gpipe.core.frontends.module_list.arguments import (
    WHOLE,
    Arguments,
    Path,
    Reading,
    first_reading,
    other_reading,
)
from lightning_gpipe.core.frontends.module_list.calls import Call, Learned
from lightning_gpipe.core.frontends.module_list.effects import Undisturbed, copied, fingerprint
from lightning_gpipe.core.frontends.module_list.evidence import Altered, equal_draws
from lightning_gpipe.core.frontends.module_list.placeholder import Placeholder
from lightning_gpipe.core.frontends.module_list.results import Result, TensorLeaf, equal, with_given
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
        if not unknown:
            return self._learned(self._only(readings), {})
        tensors = {path: self._leaves[path] for path in unknown}
        sizes = self._sizes_beside_rows()
        first = {path: first_reading(x, self._rows, sizes) for path, x in tensors.items()}
        others = {path: other_reading(x, self._rows, first[path]) for path, x in tensors.items()}
        altered: Altered | None = Altered(tensors, first, self._rows)
        found = self._attempt({**readings, **first}, altered=altered)
        if found is None:
            altered = None  # it may be that only the altered values raise an error
            try:
                found = self._run({**readings, **first})
            except Exception as error:
                return self._learned(*self._other_readings(readings, first, others, error))
        settled = dict(first)
        for path in unknown:
            if altered is None or not altered.shown(path, found.result):
                flipped = {**readings, **settled, path: others[path]}
                again = self._attempt(flipped, altered=altered)
                if again is not None and not equal(again.result, found.result):
                    settled[path] = self._settled({**readings, **settled}, flipped, path)
        return self._learned(found if altered is None else self._of_few(found, altered), settled)

    def _learned(self, found: Try, settled: dict[Path, Reading]) -> tuple[Learned, Try]:
        result = Result.of(found.result, self._few)
        return Learned(result, settled, found.filled), found

    def _only(self, readings: Mapping[Path, Reading]) -> Try:
        """What the call returns, if it is known how its arguments are cut."""
        try:
            return self._run(readings)
        except Exception as error:
            raise self._failure(error, readings) from error.__cause__

    def _sizes_beside_rows(self) -> frozenset[int]:
        """The sizes of the dims of all arguments but the first ones."""
        found = (leaf for leaf in self._leaves.values() if isinstance(leaf, Tensor))
        known = (self._sample(x) if isinstance(x, Placeholder) else x for x in found)
        return frozenset(size for x in known for size in x.shape[1:])

    def _of_few(self, found: Try, altered: Altered) -> Try:
        """What the call returned, of as many rows as there are samples."""
        result = Result.of(found.result, altered.count)
        flat = result.flat(found.result)
        assert flat is not None, "the structure is that of this result"
        cut = [
            few_of(x, leaf.reading or WHOLE, altered.count, self._few)
            if isinstance(leaf, TensorLeaf)
            else x
            for x, leaf in zip(flat, result.leaves, strict=True)
        ]
        return found._replace(result=result.tree(cut))

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
            if run and all(equal(each.result, run[0][0].result) for each, _ in run):
                return run[0]
            if run:
                differing = [p for p in first if len({settled[p] for _, settled in run}) > 1]
                raise self._doubt(differing)
        raise self._failure(error, {**readings, **first}) from error.__cause__

    def _settled(
        self, readings: Mapping[Path, Reading], flipped: Mapping[Path, Reading], path: Path
    ) -> Reading:
        """The reading of an argument, if two run, and make a difference.

        Raises:
            Doubt: If nothing tells which is right.
        """
        # One may run only because a block counts the rows of all its input together, as in
        # `x.view(rows, -1, width)`: not with a number of rows that does not divide it.
        few = _no_divisor(self._leaves[path].numel())
        first, second = self._attempt(readings, few), self._attempt(flipped, few)
        if first is not None and (second is None or equal(first.result, second.result)):
            return readings[path]
        if first is None and second is not None:
            return flipped[path]
        raise self._doubt([path])

    def _attempt(
        self,
        readings: Mapping[Path, Reading],
        few: int | None = None,
        *,
        altered: Altered | None = None,
    ) -> Try | None:
        """What the call returns, or None if it raises an error."""
        try:
            return self._run(readings, few, altered=altered)
        except Exception:
            return None

    def _run(
        self,
        readings: Mapping[Path, Reading],
        few: int | None = None,
        *,
        altered: Altered | None = None,
    ) -> Try:
        """Run the call on a few rows of everything.

        Args:
            readings: How tensors from outside are cut.
            few: Another number of rows than usual.
            altered: Copies of one row, in place of a few rows.
        """
        device = self._call.device
        copies: dict[Path, tuple[Any, Any]] = {}

        def cut(path: Path, x: Tensor, reading: Reading, rows: int | None) -> Tensor:
            if rows is None or reading == WHOLE:
                return x.detach()
            if altered is not None:
                return altered.copies(path, few_of(x, reading, rows, 1))
            return few_of(x, reading, rows, few or self._few)

        def given(path: Path, leaf: Any) -> Any:
            if isinstance(leaf, Placeholder):
                made = cut(path, self._sample(leaf), leaf.leaf.reading or WHOLE, self._few)
                return made.to(device, copy=True)
            if isinstance(leaf, Tensor):
                made = cut(path, leaf, readings[path], self._rows).to(device, copy=True)
            elif is_own(leaf):
                made = copied(leaf)
            else:
                return leaf
            copies[path] = made, fingerprint(made)
            return made

        draws = NOTHING if altered is None else equal_draws()
        with Undisturbed(self._call.modules, device), draws:
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
