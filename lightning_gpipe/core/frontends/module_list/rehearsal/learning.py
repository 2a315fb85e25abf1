"""Learns, once for each kind of call, what it returns and how its arguments are cut."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gpipe.core.data import has_entry_per_row, is_whole
from lightning_gpipe.core.faithful import record
from lightning_gpipe.core.frontends.module_list.rehearsal.rehearsal import Rehearsal, Trial
from lightning_gpipe.core.frontends.module_list.rehearsal.samples import Samples
from lightning_gpipe.core.frontends.module_list.tape.arguments import (
    WHOLE,
    Arguments,
    Path,
    Reading,
    map_leaves,
    reads_as_rows,
)
from lightning_gpipe.core.frontends.module_list.tape.calls import Knowledge, RecordedCall
from lightning_gpipe.core.frontends.module_list.tape.placeholder import Placeholder
from lightning_gpipe.core.layout import is_user_object, tensors_within

Check = Callable[[Knowledge, Trial], None]

_KINDS = 10_000  # of calls, of which something is known


@dataclass(frozen=True, eq=False)
class Learner:
    """Learns how the calls of one forward are cut, along with dim 0 of ``first``.

    ``knowledge``, by kind of call, grows; ``samples`` are the values for a few rows.
    """

    first: Tensor
    knowledge: dict[Hashable, Knowledge]
    caches: CacheRule
    samples: Samples
    grad: bool

    def learn(
        self, call: RecordedCall, arguments: Arguments, check: Check | None = None
    ) -> tuple[Knowledge, Arguments, dict[Path, Reading], Trial | None]:
        """Return the knowledge about a call, after a rehearsal if it is of a new kind.

        With it come its arguments without objects that must not be filled, the readings of tensors
        from outside, and the rehearsal. ``check`` raises if that cannot run in micro-batches.
        """
        key, trial = kind_of_call(call, arguments), None
        knowledge = self.knowledge.get(key)
        if knowledge is not None and knowledge.rows < self.samples.rows:
            knowledge = None
        if knowledge is None:
            self._expect_filled(call, arguments)
            self._warn_of_lists(call, arguments)
        readings, unknown = self._readings(arguments, knowledge)
        if knowledge is None or unknown or not (knowledge.complete or self.samples.single):
            before = {} if knowledge is None else knowledge.readings
            knowledge, trial = self._rehearse(call, arguments, self.samples.few, readings, unknown)
            knowledge.readings = {**before, **knowledge.readings}
            if check is not None:
                check(knowledge, trial)
            record(self.knowledge, key, knowledge, _KINDS)
            readings, _ = self._readings(arguments, knowledge)
        if knowledge.filled_objects and self.grad:
            empty = Arguments(self.caches.without(call, arguments.tree, knowledge.filled_objects))
            return self.learn(call, empty, check)
        if knowledge.filled_objects:
            self.caches.one_by_one(call, knowledge.filled_objects, self.samples.rows)
            self.samples.take_all()
            trial = None  # it may be that of a few rows
            readings, _ = self._readings(arguments, knowledge)
        self._check_objects(call, arguments.leaves, knowledge.filled_objects)
        return knowledge, arguments, readings, trial

    def reading(self, tensor: Tensor, learned_reading: Reading | None) -> Reading | None:
        """Return how a tensor from outside is cut, or None if a rehearsal must show it."""
        if tensor is self.first:
            return 1
        if self.samples.single or not reads_as_rows(tensor, self.samples.rows):
            return WHOLE
        if is_whole(tensor) or isinstance(tensor, nn.Parameter):
            return WHOLE
        return (
            learned_reading
            if learned_reading in (WHOLE, tensor.size(0) // self.samples.rows)
            else None
        )

    def _rehearse(
        self,
        call: RecordedCall,
        arguments: Arguments,
        few: int | None,
        readings: Mapping[Path, Reading],
        unknown: Sequence[Path],
    ) -> tuple[Knowledge, Trial]:
        for _, leaf in arguments.leaves:  # other stages may have to compute it first
            if isinstance(leaf, Placeholder):
                _ = self.samples[leaf.number]
        rehearsal = Rehearsal(call, arguments, few, self.samples)
        learned: tuple[Knowledge, Trial] = self.samples.rehearse(
            call.stage, partial(rehearsal.learn, readings, unknown)
        )
        return learned

    def _readings(
        self, arguments: Arguments, knowledge: Knowledge | None
    ) -> tuple[dict[Path, Reading], list[Path]]:
        readings: dict[Path, Reading] = {}
        unknown: list[Path] = []
        learned_readings = {} if knowledge is None else knowledge.readings
        for path, leaf in arguments.leaves:
            if not isinstance(leaf, Tensor) or type(leaf) is Placeholder:
                continue
            reading = self.reading(leaf, learned_readings.get(path))
            if reading is None:
                unknown.append(path)
            else:
                readings[path] = reading
        return readings, unknown

    def _expect_filled(self, call: RecordedCall, arguments: Arguments) -> None:
        """Prepare for an object among the arguments that has the rows of the mini-batch already."""
        others = [
            (path, leaf)
            for path, leaf in arguments.leaves
            if not is_user_object(leaf)
            or any(isinstance(x, Placeholder) for x in tensors_within(leaf))
        ]
        self._check_objects(call, others)
        if not any(x.dim() for _, value in arguments.objects for x in tensors_within(value)):
            return
        if not self.grad:
            self.samples.take_all()
        elif not any(isinstance(leaf, Placeholder) for _, leaf in arguments.leaves):
            whole = dict.fromkeys(chain(*self._readings(arguments, None)), WHOLE)
            knowledge, _ = self._rehearse(call, arguments, None, whole, [])
            if knowledge.filled_objects:
                self.caches.without(call, arguments.tree, knowledge.filled_objects)
            self._check_objects(call, arguments.objects, knowledge.filled_objects)

    def _check_objects(
        self,
        call: RecordedCall,
        leaves: Sequence[tuple[Path, Any]],
        filled_objects: Collection[Path] = (),
    ) -> None:
        """Refuse tensors with rows, and placeholders, in objects, where they cannot be cut."""
        for path, leaf in leaves:
            if isinstance(leaf, Tensor) or path in filled_objects:
                continue
            for tensor in tensors_within(leaf):
                cut = not (self.samples.single or is_whole(tensor))
                if isinstance(tensor, Placeholder) or (
                    cut and reads_as_rows(tensor, self.samples.rows)
                ):
                    raise TypeError(
                        "the tensors that blocks are called with must be arguments themselves, or "
                        "in tuples, lists and dicts, to be cut into micro-batches: got one of "
                        f"shape {tuple(tensor.shape)}, with {self.samples.rows} rows, in "
                        f"{call.titles([path])} of {call}, a {type(leaf).__name__}. Pass its "
                        "tensors, and construct it in the block."
                    )

    def _warn_of_lists(self, call: RecordedCall, arguments: Arguments) -> None:
        """Warn of lists with as many entries as rows, all of which every micro-batch gets."""
        if not call.modules or self.samples.single:
            return
        args, kwargs = arguments.tree
        paths = [(0, k) for k, _ in enumerate(args)] + [(1, key) for key in kwargs]
        rows = {self.samples.rows} - {1}
        for path, value in zip(paths, [*args, *kwargs.values()], strict=True):
            if has_entry_per_row(value, rows):
                warnings.warn(
                    f"each micro-batch gets all {len(value)} values of {call.titles([path])} of "
                    f"{call}, a {type(value).__name__} as long as the mini-batch has rows. If "
                    "there is a value for each row, pass a tensor. If not, write whole(...), from "
                    "lightning_gpipe.",
                    stacklevel=2,
                )


class CacheRule:
    """Decides about objects that blocks fill, such as the caches of keys and values.

    Micro-batches would fill a cache over one another. Without gradients the mini-batch runs in one
    micro-batch, which fills it as the plain model does. With gradients blocks get None instead, as
    in libraries that recompute layers. ``spread``: other processes fill objects of their own.
    """

    def __init__(self, *, spread: bool) -> None:
        self._spread = spread
        self._warned_without = False
        self._warned_one_by_one = False

    def without(self, call: RecordedCall, arguments: Any, paths: Collection[Path]) -> Any:
        """Return the arguments with None for the objects at these paths, which blocks fill."""

        def emptied(path: Path, leaf: Any) -> Any:
            if path not in paths:
                return leaf
            if any(x.dim() for x in tensors_within(leaf)):  # others count
                raise RuntimeError(
                    f"an object that blocks fill must be empty if gradients are recorded: got "
                    f"{call.titles([path])} of {call}, a {type(leaf).__name__} that holds tensors. "
                    "Micro-batches cannot fill it one after another: run without gradients, or do "
                    "not pass it."
                )
            return None

        without = map_leaves(emptied, arguments)
        if not self._warned_without:
            self._warned_without = True
            warnings.warn(
                f"{_named(call, paths)} is None while gradients are recorded: blocks fill it, and "
                "micro-batches would fill it over one another. To do without this warning, do not "
                "pass it: for a model of transformers write model.config.use_cache = False.",
                stacklevel=2,
            )
        return without

    def one_by_one(self, call: RecordedCall, paths: Collection[Path], rows: int) -> None:
        """Warn that a mini-batch runs in one micro-batch, to fill the objects at these paths."""
        if self._spread:
            raise RuntimeError(
                "an object that blocks fill must be in one process with all of them: got "
                f"{_named(call, paths)}, and stages in several processes, each of which would "
                "fill only a part of its own object. Do not pass it: for a model of transformers "
                "write model.config.use_cache = False; generation then computes all positions "
                "again for each token. Or run all stages in one process."
            )
        if rows > 1 and not self._warned_one_by_one:
            self._warned_one_by_one = True
            warnings.warn(
                f"{_named(call, paths)} is filled by blocks, so that mini-batches run in one "
                "micro-batch, in which stages wait for one another. Generation needs that. "
                "Evaluation does not: for a model of transformers write use_cache=False there.",
                stacklevel=2,
            )


def _named(call: RecordedCall, paths: Collection[Path]) -> str:
    return f"{call.titles(sorted(paths, key=str))} of {call}"


def kind_of_call(call: RecordedCall, arguments: Arguments) -> Hashable:
    """Return a key of calls with one structure of results, and arguments cut in the same way."""
    leaves = [_kind_of(leaf) for _, leaf in arguments.leaves]
    if not call.modules:  # an operator, to which dims and indices make a difference
        leaves += [str(leaf) for _, leaf in arguments.leaves if type(leaf) in (int, slice)]
    return call.kind, arguments.structure, tuple(leaves)


def _kind_of(leaf: Any) -> Any:
    if isinstance(leaf, Placeholder):
        x = leaf.leaf
        moved = (x.dim, x.inner, x.reading == WHOLE)
        return (Tensor, x.dtype, x.dims, moved) if any(moved) else (Tensor, x.dtype, x.dims)
    if isinstance(leaf, Tensor):
        return Tensor, leaf.dtype, leaf.dim()
    if isinstance(leaf, bool | str | None | torch.dtype | torch.device):
        return leaf
    return type(leaf)
