"""Finds out, once for each kind of call, what it returns and how its arguments are cut."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from lightning_gpipe.core.data import is_whole
from lightning_gpipe.core.frontends.module_list.arguments import (
    WHOLE,
    Arguments,
    Path,
    Reading,
    reading_of,
    reads_as_rows,
)
from lightning_gpipe.core.frontends.module_list.caches import CacheRule
from lightning_gpipe.core.frontends.module_list.calls import Call, Learned, kind_of
from lightning_gpipe.core.frontends.module_list.effects import tensors_held
from lightning_gpipe.core.frontends.module_list.placeholder import Placeholder
from lightning_gpipe.core.frontends.module_list.rehearsal import Rehearsal, Try
from lightning_gpipe.core.frontends.module_list.samples import Rehearse, Samples
from lightning_gpipe.core.plan import is_own

Check = Callable[[Learned, Try], None]


class Known(NamedTuple):
    """What is known of one call.

    Attributes:
        learned: Of its kind.
        given: Its arguments, without objects that must not be filled.
        readings: How the tensors from outside among them are cut.
        found: What a rehearsal of it returned, if there was one now.
    """

    learned: Learned
    given: Arguments
    readings: dict[Path, Reading]
    found: Try | None


class Learner:
    """Knows how the calls of one forward are cut.

    Args:
        first: The tensor whose dim 0 is the rows of the mini-batch.
        knowledge: What is known of kinds of calls; it grows.
        caches: What to do about objects that blocks fill.
        grad: Whether gradients are recorded.
        samples: The values of the forward for a few rows.
        rehearse: Runs calls of a stage, for all processes.

    Attributes:
        rows: The number of rows.
        single: Whether the program must run in one micro-batch.
    """

    def __init__(
        self,
        first: Tensor,
        knowledge: dict[Hashable, Learned],
        caches: CacheRule,
        samples: Samples,
        rehearse: Rehearse,
        *,
        grad: bool,
    ) -> None:
        self.rows = first.size(0)
        self.single = self.rows <= 1
        self._first, self._grad = first, grad
        self._knowledge, self._caches, self._samples = knowledge, caches, samples
        self._rehearse = rehearse

    def known(self, call: Call, given: Arguments, check: Check) -> Known:
        """What is known of a call; rehearsed if it is of a new kind.

        Args:
            call: The call.
            given: Its arguments.
            check: Raises if what was learned in a rehearsal cannot run in micro-batches.
        """
        key, found = kind_of_call(call, given), None
        learned = self._knowledge.get(key)
        if learned is None:
            self._expect_filled(call, given)
        readings, unknown = self._readings(given, learned)
        if learned is None or unknown or not (learned.complete or self.single):
            before = {} if learned is None else learned.readings
            learned, found = self._learn(call, given, self._samples.few, readings, unknown)
            learned.readings = {**before, **learned.readings}
            check(learned, found)
            self._knowledge[key] = learned
            readings, _ = self._readings(given, learned)
        if learned.filled and self._grad:
            empty = Arguments(self._caches.without(call, given.tree, learned.filled))
            return self.known(call, empty, check)
        if learned.filled:
            self._caches.one_by_one(call, learned.filled, self.rows)
            self._make_single()
            found = None  # it may be that of a few rows
            readings, _ = self._readings(given, learned)
        self._check_held(call, given.leaves, learned.filled)
        return Known(learned, given, readings, found)

    def reading(self, tensor: Tensor, learned: Reading | None) -> Reading | None:
        """How a tensor from outside is cut; None if that must be found out.

        Args:
            tensor: The tensor.
            learned: What was learned of another one there.
        """
        if tensor is self._first:
            return 1
        return WHOLE if self.single else reading_of(tensor, self.rows, learned)

    def _learn(
        self,
        call: Call,
        given: Arguments,
        few: int | None,
        readings: Mapping[Path, Reading],
        unknown: Sequence[Path],
    ) -> tuple[Learned, Try]:
        """What a rehearsal of a call shows, which runs where its stage is."""
        for _, leaf in given.leaves:  # other stages may have to compute it first
            if isinstance(leaf, Placeholder):
                self._sample(leaf)
        rehearsal = Rehearsal(call, given, self.rows, few, self._sample)
        found: tuple[Learned, Try] = self._rehearse(
            call.stage, lambda: rehearsal.learn(readings, unknown)
        )
        return found

    def _readings(
        self, given: Arguments, learned: Learned | None
    ) -> tuple[dict[Path, Reading], list[Path]]:
        """How tensors from outside are cut, and those of which it is not known."""
        readings: dict[Path, Reading] = {}
        unknown: list[Path] = []
        known = {} if learned is None else learned.readings
        for path, leaf in given.leaves:
            if not isinstance(leaf, Tensor) or type(leaf) is Placeholder:
                continue
            found = self.reading(leaf, known.get(path))
            if found is None:
                unknown.append(path)
            else:
                readings[path] = found
        return readings, unknown

    def _expect_filled(self, call: Call, given: Arguments) -> None:
        """Prepare for an object among the arguments that has the rows of the mini-batch already."""
        self._check_held(call, [each for each in given.leaves if not is_own(each[1])])
        if not any(True for _, each in given.objects for _ in tensors_held(each)):
            return
        if not self._grad:
            self._make_single()
        elif not any(isinstance(leaf, Placeholder) for _, leaf in given.leaves):
            whole = dict.fromkeys(self._readings(given, None)[0], WHOLE)
            learned, _ = self._learn(call, given, None, whole, [])
            if learned.filled:
                self._caches.without(call, given.tree, learned.filled)
            self._check_held(call, given.objects, learned.filled)

    def _check_held(
        self, call: Call, leaves: Sequence[tuple[Path, Any]], filled: Collection[Path] = ()
    ) -> None:
        """Refuse tensors with rows where they cannot be cut.

        Raises:
            TypeError: Names the argument.
        """
        for path, leaf in () if self.single else leaves:
            if isinstance(leaf, Tensor) or path in filled:
                continue
            for tensor in tensors_held(leaf):
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


def kind_of_call(call: Call, given: Arguments) -> Hashable:
    """Equal for calls that return the same structure, and cut their arguments in the same way."""
    return call.kind, given.structure, tuple([kind_of(leaf) for _, leaf in given.leaves])
