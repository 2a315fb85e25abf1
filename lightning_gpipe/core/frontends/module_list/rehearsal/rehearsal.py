"""Runs calls on a few rows, to learn what they return and how their arguments are cut.

Most arguments are cut as their shapes say. Where a shape allows two readings, both are tried: a
mask of shape (rows, 1, length, length), passed whole to two rows, does not run; nor does a table of
positions with as many entries as rows, when it is cut. If both run and return the same, the
argument has no influence; if they differ, the user must say which is meant.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_gpipe.core.data import tree_flatten
from lightning_gpipe.core.faithful import RandomState, add_note
from lightning_gpipe.core.frontends.cuts import Cut, few_of
from lightning_gpipe.core.frontends.module_list.rehearsal.probes import (
    PROBED,
    Probe,
    located,
    with_different_rows,
)
from lightning_gpipe.core.frontends.module_list.rehearsal.samples import (
    Samples,
    deep_copy,
    fingerprint,
    without_effects,
)
from lightning_gpipe.core.frontends.module_list.tape.arguments import (
    WHOLE,
    Arguments,
    Path,
    Reading,
    first_reading,
)
from lightning_gpipe.core.frontends.module_list.tape.calls import (
    Knowledge,
    RecordedCall,
    Result,
    equal,
    with_returned_arguments,
)
from lightning_gpipe.core.frontends.module_list.tape.placeholder import Placeholder
from lightning_gpipe.core.layout import is_user_object

_MOST_FLIPPED = 2  # arguments that get their other reading at a time, before all of them do

Readings = Mapping[Path, Reading]


class Doubt(ValueError):
    """Raised for an argument that may be cut or not."""


class Trial(NamedTuple):
    """The result of a call on a few rows, and the arguments that it changed."""

    result: Any
    filled_objects: frozenset[Path]
    edited_tensors: frozenset[Path]  # from outside
    draws: bool  # random numbers
    mixes: bool = False  # its rows, though it is an operator


@dataclass(frozen=True, eq=False)
class Rehearsal:
    """One call of a new kind, run on ``few`` rows of the mini-batch; on all if that is None.

    ``samples`` has the values of placeholders for these rows.
    """

    call: RecordedCall
    arguments: Arguments
    few: int | None
    samples: Samples

    @cached_property
    def _leaves(self) -> dict[Path, Any]:
        return dict(self.arguments.leaves)

    def learn(self, readings: Readings, unknown: Sequence[Path]) -> tuple[Knowledge, Trial]:
        """Run the call, and return what is known of its kind then.

        ``unknown`` are the tensors without a reading. Raises a ValueError if arguments have several
        readings that make a difference, and what the call raises with all of them, with a note.
        """
        sizes = self._sizes_beside_rows() if unknown else frozenset()
        first = {
            path: first_reading(self._leaves[path], self.samples.rows, sizes) for path in unknown
        }
        readings = {**readings, **first}
        try:
            trial = self._run(readings)
        except Exception as error:
            trial, readings = self._with_others(readings, unknown, error)
        else:
            for path in unknown:
                if self._needs_other(readings, path):
                    readings = self._flipped(readings, [path])
                    trial = self._run(readings)
        cuts = (x.leaf.cut for x in self._leaves.values() if isinstance(x, Placeholder))
        _, dim, inner = next(cuts, (None, 0, False))
        result = Result.of(trial.result, self.few, dim, inner)
        if not (self.few is None or self.call.modules):
            leaves = self._located(readings, trial, result)
            result = replace(result, leaves=tuple(leaves or result.leaves))
            trial = trial._replace(mixes=leaves is None)
        learned_readings = {path: readings[path] for path in unknown}
        rows = math.inf if self.call.modules else self.samples.rows
        return Knowledge(result, learned_readings, trial.filled_objects, rows), trial

    def _located(self, readings: Readings, trial: Trial, result: Result) -> Sequence[Any] | None:
        """Return the leaves of a result with the dims of their rows; None if it mixes rows."""

        def run(probe: Probe, fill: int | None = None) -> list[Any]:
            return tree_flatten(self._run(readings, PROBED, probe, fill).result).leaves

        return located(result.leaves, run, self._shapes, self.samples.rows, draws=trial.draws)

    def _shapes(self) -> list[Any]:
        """The leaves of the result with all rows, without values."""

        def without_values(leaf: Any) -> Any:
            if isinstance(leaf, Placeholder):
                sample = self.samples[leaf.number]
                shape = self.samples.scaled(sample.shape, leaf.leaf.cut)
                return torch.empty(shape, dtype=sample.dtype, device="meta")
            if isinstance(leaf, Tensor):
                return leaf.detach().to("meta")
            return deep_copy(leaf) if is_user_object(leaf) else leaf

        leaves = (without_values(leaf) for _, leaf in self.arguments.leaves)
        args, kwargs = self.arguments.with_leaves(leaves)
        with without_effects((), self.call.device):
            return tree_flatten(self.call.run(*args, **kwargs)).leaves

    def _sizes_beside_rows(self) -> frozenset[int]:
        leaves = (leaf for leaf in self._leaves.values() if isinstance(leaf, Tensor))
        tensors = (self.samples[x.number] if isinstance(x, Placeholder) else x for x in leaves)
        return frozenset(size for x in tensors for size in x.shape[1:])

    def _flipped(self, readings: Readings, paths: Iterable[Path]) -> dict[Path, Reading]:
        others = {
            path: WHOLE if readings[path] else self._leaves[path].size(0) // self.samples.rows
            for path in paths
        }
        return {**readings, **others}

    def _with_others(
        self, readings: Readings, unknown: Sequence[Path], error: Exception
    ) -> tuple[Trial, Readings]:
        """The result with the only other readings that run, and these."""
        for choices in _flips(unknown):
            ways = [self._flipped(readings, paths) for paths in choices]
            trials = [(trial, way) for way in ways if (trial := self._attempt(way)) is not None]
            if trials and all(equal(trial.result, trials[0][0].result) for trial, _ in trials):
                return trials[0]
            if trials:
                raise self._doubt([p for p in unknown if len({way[p] for _, way in trials}) > 1])
        raise self._failure(error, readings) from error.__cause__

    def _needs_other(self, readings: Readings, path: Path) -> bool:
        """Return True if only the other reading of an argument is right, though these run.

        Raises a Doubt if both run and differ, and rows may depend on others with both or neither.
        """
        # A block may count the rows of all its input together, as in `x.view(rows, -1, width)`. So
        # neither reading runs by chance, the number of rows is one that divides no such count.
        few = next(k for k in count(2) if max(self._leaves[path].numel(), 1) % k)
        flipped = self._flipped(readings, [path])
        other = self._attempt(flipped, few)
        if other is None:
            return False
        first = self._attempt(readings, few)
        if first is None or equal(first.result, other.result):
            return first is None
        result = Result.of(first.result, None)
        by_rows, other_by_rows = (
            self._located(way, first, result) is not None for way in (readings, flipped)
        )
        if by_rows == other_by_rows:
            raise self._doubt([path])
        return other_by_rows

    def _attempt(self, *how: Any) -> Trial | None:
        try:
            return self._run(*how)
        except Exception:
            return None

    def _run(
        self,
        readings: Readings,
        few: int | None = None,
        probe: Probe | None = None,
        fill: int | None = None,
    ) -> Trial:
        """Run the call on a few rows, or on the rows ``probe`` of ones that all differ.

        All values of the latter may be ``fill``.
        """
        few = few or self.few
        device = self.call.device
        copies: dict[Path, tuple[Any, Any]] = {}

        def some(x: Tensor, cut: Cut, rows: int) -> Tensor:
            x = few_of(x, cut, rows, few)
            if probe is not None and few is not None and cut[0]:
                x = few_of(with_different_rows(x), cut, few, probe)
                x = x if fill is None else torch.full_like(x, fill)
            return x.to(device, copy=True)

        def copy_of(path: Path, leaf: Any) -> Any:
            if isinstance(leaf, Placeholder):
                return some(self.samples[leaf.number], leaf.leaf.cut, self.few or self.samples.rows)
            if isinstance(leaf, Tensor):
                copy = some(leaf, (readings[path], 0, False), self.samples.rows)
            elif is_user_object(leaf):
                copy = deep_copy(leaf)
            else:
                return leaf
            copies[path] = copy, fingerprint(copy)
            return copy

        objects = [path for path, _ in self.arguments.objects]
        with without_effects(self.call.modules, device):
            state = RandomState.capture([device])
            leaves = self.arguments.leaves
            args, kwargs = self.arguments.with_leaves(copy_of(path, leaf) for path, leaf in leaves)
            before = Arguments((args, kwargs))
            result = self.call.run(*args, **kwargs)
            if not before.same_containers():
                raise TypeError(
                    "blocks must not change a list or dict that they are called with, since each "
                    f"micro-batch gets its own: {self.call} changed one. Return the new values, "
                    "and add them to it after the call."
                )
            draws = bool(state.differences())
            changes = {path for path, (x, before) in copies.items() if fingerprint(x) != before}
            result = with_returned_arguments(result, [(path, copies[path][0]) for path in objects])
        filled_objects = frozenset(changes & set(objects))
        return Trial(result, filled_objects, frozenset(changes - filled_objects), draws)

    def _failure(self, error: Exception, readings: Readings) -> Exception:
        """The error to raise for a call's error: the same with a note, or one about its rows."""
        whole = self._shapes_of(path for path, reading in readings.items() if reading == WHOLE)
        all_whole = dict.fromkeys(readings, WHOLE)
        placeholders = any(isinstance(leaf, Placeholder) for leaf in self._leaves.values())
        if self.few is None or placeholders or self._attempt(all_whole) is None:
            few = "" if self.few is None else f" on {self.few} of the {self.samples.rows} rows"
            uncut = f" What is given whole to every micro-batch: {whole}." if whole else ""
            add_note(
                error,
                f"raised when {self.call} was tried{few}, before it runs in micro-batches. The "
                f"rows of tensors must be in dim 0.{uncut}",
            )
            return error
        cut = self._shapes_of(path for path, reading in readings.items() if reading != WHOLE)
        hint = "A model whose sequence comes before its rows cannot be cut in a loop over blocks."
        if any(reading and self._leaves[path].dim() == 1 for path, reading in readings.items()):
            hint = "A single sample without rows needs a dim for them, as x[None] has."
        first_line = next(iter(str(error).splitlines()), "").rstrip(".")
        return ValueError(
            "the rows of what a block is called with must be in dim 0, so that it can be cut: "
            f"{self.call} runs on all {self.samples.rows} rows, and on {self.few} of them it "
            f"raises {type(error).__name__}: {first_line}. Cut was {cut}; whole was "
            f"{whole or 'nothing'}. {hint} If one of these tensors has no rows, write "
            "whole(tensor), from lightning_gpipe."
        )

    def _doubt(self, paths: Sequence[Path]) -> Doubt:
        shapes = ", ".join(str(tuple(self._leaves[path].shape)) for path in paths)
        return Doubt(
            f"it must be clear whether the rows of an argument of {self.call} are those of the "
            f"mini-batch: got {self.call.titles(paths)} of shape {shapes} with "
            f"{self.samples.rows} rows, and both readings run, with different results. Write "
            "whole(tensor), from lightning_gpipe, for one that every micro-batch needs as a whole; "
            "give one with rows the number of rows, and nothing else, in dim 0."
        )

    def _shapes_of(self, paths: Iterable[Path]) -> str:
        shapes = [(self.call.titles([path]), tuple(self._leaves[path].shape)) for path in paths]
        return ", ".join(f"{name} {shape}" for name, shape in shapes if shape)


def _flips(paths: Sequence[Path]) -> Iterator[list[tuple[Path, ...]]]:
    """Yield the arguments to read otherwise: each alone, then pairs, then all."""
    for k in range(1, min(_MOST_FLIPPED, len(paths)) + 1):
        yield list(combinations(paths, k))
    if len(paths) > _MOST_FLIPPED:
        yield [tuple(paths)]
