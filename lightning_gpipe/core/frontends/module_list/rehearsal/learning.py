"""Learns, once for each kind of call, what it returns and how its arguments are cut."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_gpipe.core.data import is_whole
from lightning_gpipe.core.frontends.module_list.rehearsal.caches import CacheRule
from lightning_gpipe.core.frontends.module_list.rehearsal.effects import tensors_within
from lightning_gpipe.core.frontends.module_list.rehearsal.rehearsal import Rehearsal, Trial
from lightning_gpipe.core.frontends.module_list.rehearsal.samples import Samples
from lightning_gpipe.core.frontends.module_list.tape.arguments import (
    WHOLE,
    Arguments,
    Path,
    Reading,
    reading_of,
    reads_as_rows,
)
from lightning_gpipe.core.frontends.module_list.tape.calls import Knowledge, RecordedCall
from lightning_gpipe.core.frontends.module_list.tape.placeholder import Placeholder
from lightning_gpipe.core.layout import is_user_object

Check = Callable[[Knowledge, Trial], None]


class LearnedCall(NamedTuple):
    """The knowledge about one call."""

    knowledge: Knowledge
    arguments: Arguments  # without objects that must not be filled
    readings: dict[Path, Reading]  # of the tensors from outside
    trial: Trial | None  # if it was rehearsed now


class Learner:
    """Learns how the calls of one forward are cut.

    Args:
        first: The tensor whose dim 0 is the rows of the mini-batch.
        knowledge: The knowledge about each kind of call; it grows.
        caches: What to do about objects that blocks fill.
        samples: The values of the forward for a few rows.
        grad: Whether gradients are recorded.

    Attributes:
        single: Whether the program must run in one micro-batch.
    """

    def __init__(
        self,
        first: Tensor,
        knowledge: dict[Hashable, Knowledge],
        caches: CacheRule,
        samples: Samples,
        *,
        grad: bool,
    ) -> None:
        self.rows = first.size(0)
        self.single = self.rows <= 1
        self._first, self._grad = first, grad
        self._knowledge, self._caches, self._samples = knowledge, caches, samples

    def learn(
        self, call: RecordedCall, arguments: Arguments, check: Check | None = None
    ) -> LearnedCall:
        """Return the knowledge about a call; rehearse it if it is of a new kind.

        ``check`` raises if what a rehearsal has shown cannot run in micro-batches.
        """
        key, trial = kind_of_call(call, arguments), None
        knowledge = self._knowledge.get(key)
        if knowledge is None:
            self._expect_filled(call, arguments)
        readings, unknown = self._readings(arguments, knowledge)
        if knowledge is None or unknown or not (knowledge.complete or self.single):
            before = {} if knowledge is None else knowledge.readings
            knowledge, trial = self._rehearse(call, arguments, self._samples.few, readings, unknown)
            knowledge.readings = {**before, **knowledge.readings}
            if check is not None:
                check(knowledge, trial)
            self._knowledge[key] = knowledge
            readings, _ = self._readings(arguments, knowledge)
        if knowledge.filled_objects and self._grad:
            empty = Arguments(self._caches.without(call, arguments.tree, knowledge.filled_objects))
            return self.learn(call, empty, check)
        if knowledge.filled_objects:
            self._caches.one_by_one(call, knowledge.filled_objects, self.rows)
            self._make_single()
            trial = None  # it may be that of a few rows
            readings, _ = self._readings(arguments, knowledge)
        self._check_objects(call, arguments.leaves, knowledge.filled_objects)
        return LearnedCall(knowledge, arguments, readings, trial)

    def reading(self, tensor: Tensor, learned_reading: Reading | None) -> Reading | None:
        """Return how a tensor from outside is cut: see :func:`reading_of`."""
        if tensor is self._first:
            return 1
        return WHOLE if self.single else reading_of(tensor, self.rows, learned_reading)

    def _rehearse(
        self,
        call: RecordedCall,
        arguments: Arguments,
        few: int | None,
        readings: Mapping[Path, Reading],
        unknown: Sequence[Path],
    ) -> tuple[Knowledge, Trial]:
        """Rehearse a call where its stage is."""
        for _, leaf in arguments.leaves:  # other stages may have to compute it first
            if isinstance(leaf, Placeholder):
                self._sample(leaf)
        rehearsal = Rehearsal(call, arguments, self.rows, few, self._sample)
        knowledge_and_trial: tuple[Knowledge, Trial] = self._samples.rehearse(
            call.stage, lambda: rehearsal.learn(readings, unknown)
        )
        return knowledge_and_trial

    def _readings(
        self, arguments: Arguments, knowledge: Knowledge | None
    ) -> tuple[dict[Path, Reading], list[Path]]:
        """The readings of the tensors from outside, and those that must be learned."""
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
        self._check_objects(
            call, [(path, x) for path, x in arguments.leaves if not is_user_object(x)]
        )
        if not any(True for _, value in arguments.objects for _ in tensors_within(value)):
            return
        if not self._grad:
            self._make_single()
        elif not any(isinstance(leaf, Placeholder) for _, leaf in arguments.leaves):
            whole = dict.fromkeys(self._readings(arguments, None)[0], WHOLE)
            knowledge, _ = self._rehearse(call, arguments, None, whole, [])
            if knowledge.filled_objects:
                self._caches.without(call, arguments.tree, knowledge.filled_objects)
            self._check_objects(call, arguments.objects, knowledge.filled_objects)

    def _check_objects(
        self,
        call: RecordedCall,
        leaves: Sequence[tuple[Path, Any]],
        filled_objects: Collection[Path] = (),
    ) -> None:
        """Refuse tensors with rows in objects, where they cannot be cut."""
        for path, leaf in () if self.single else leaves:
            if isinstance(leaf, Tensor) or path in filled_objects:
                continue
            for tensor in tensors_within(leaf):
                if not is_whole(tensor) and reads_as_rows(tensor, self.rows):
                    raise TypeError(
                        "the tensors that blocks are called with must be arguments themselves, or "
                        "in tuples, lists and dicts, to be cut into micro-batches: got one of "
                        f"shape {tuple(tensor.shape)}, with {self.rows} rows, in "
                        f"{call.titles([path])} of {call}, a {type(leaf).__name__}. Pass its "
                        "tensors, and construct it in the block."
                    )

    def _make_single(self) -> None:
        if not self.single:
            self.single = True
            self._samples.take_all()

    def _sample(self, placeholder: Placeholder) -> Any:
        return self._samples[placeholder.number]


def kind_of_call(call: RecordedCall, arguments: Arguments) -> Hashable:
    """Equal for calls that return the same structure, and cut their arguments in the same way."""
    return call.kind, arguments.structure, tuple([_kind_of(leaf) for _, leaf in arguments.leaves])


def _kind_of(leaf: Any) -> Any:
    """Return a hashable value, equal for two arguments of one kind."""
    if isinstance(leaf, Placeholder):
        return Tensor, leaf.leaf.dtype, leaf.leaf.dims
    if isinstance(leaf, Tensor):
        return Tensor, leaf.dtype, leaf.dim()
    if isinstance(leaf, bool | str | None | torch.dtype | torch.device):
        return leaf
    return type(leaf)
