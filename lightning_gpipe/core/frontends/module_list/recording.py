"""The calls of one forward: steps of a program, and placeholders for what they return."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from lightning_gpipe.core.frontends.module_list import operators
from lightning_gpipe.core.frontends.module_list.arguments import (
    WHOLE,
    Arguments,
    Path,
    Reading,
    leaves_in,
    reading_of,
)
from lightning_gpipe.core.frontends.module_list.caches import CacheRule
from lightning_gpipe.core.frontends.module_list.calls import (
    Call,
    Expecting,
    Learned,
    Pick,
    kind_of,
)
from lightning_gpipe.core.frontends.module_list.effects import tensors_held
from lightning_gpipe.core.frontends.module_list.lines import user_line
from lightning_gpipe.core.frontends.module_list.placeholder import Placeholder
from lightning_gpipe.core.frontends.module_list.rehearsal import Doubt, Rehearsal, Try
from lightning_gpipe.core.frontends.module_list.results import Constant, Given, TensorLeaf
from lightning_gpipe.core.frontends.module_list.samples import Samples
from lightning_gpipe.core.frontends.module_list.thread_state import ThreadState
from lightning_gpipe.core.plan import Step, Value

Knowledge = dict[ThreadState, dict[Hashable, Learned]]
Check = Callable[[Learned, Try], None]

_SHAPES = 1000  # that are remembered of a kind


class Recording:
    """Records calls, and answers them with placeholders.

    Args:
        first: The tensor whose dim 0 is the rows of the mini-batch.
        knowledge: What is known of kinds of calls, by the state of the thread; it grows.
        device: Where the values of placeholders will be.
        caches: What to do about objects that blocks fill.
        state: The state of the thread in which the forward began.

    Attributes:
        steps: What was recorded, by the numbers of the results.
        inputs: The tensors from outside by number, and how they are cut.
        rows: The number of rows.
        single: Whether the program must run in one micro-batch.
        grad: Whether gradients are recorded.
        ended: Why nothing can be recorded any more, if so.
    """

    def __init__(
        self,
        first: Tensor,
        knowledge: Knowledge,
        device: torch.device,
        caches: CacheRule,
        state: ThreadState,
    ) -> None:
        self.steps: dict[int, Step] = {}
        self.inputs: dict[int, tuple[Tensor, Reading]] = {}
        self.rows = first.size(0)
        self.single = self.rows <= 1
        self.device = device
        self.grad = state.grad
        self.ended = ""
        self._first, self._state = first, state
        self._knowledge, self._caches = knowledge.setdefault(state, {}), caches
        self._calls: dict[int, tuple[Call, Learned]] = {}
        self._picked: dict[int, tuple[int, int]] = {}  # the call and the leaf of a value
        self._numbers: dict[Hashable, int] = {}
        self._tensors: list[Tensor] = []  # whose identities are in use
        self._count = 0
        self._made: list[weakref.ref[Placeholder]] = []
        few = 3 if self.rows == 2 else 2  # so that a tensor given whole does not fit
        self._samples = self._new_samples(None if self.single else few)
        self._place: Call | None = None

    @property
    def alive(self) -> list[Placeholder]:
        """The placeholders that something still refers to, in order."""
        return [each for ref in self._made if (each := ref()) is not None]

    def stage_of(self, number: int) -> int:
        """The stage that makes a value."""
        return self.steps[number].stage

    def new(self) -> int:
        """The number of a new value."""
        self._count += 1
        return self._count - 1

    def end(self, reason: str) -> None:
        """Record nothing any more, and free everything."""
        self.ended = reason
        self.steps, self.inputs, self._calls = {}, {}, {}
        self._made, self._tensors, self._numbers = [], [], {}
        self._samples = self._new_samples(None)

    def block(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record the call of a block.

        Returns:
            What it will return, with placeholders for tensors.

        Raises:
            RuntimeError: If grad mode, autocast or hooks on saved tensors are others than before.
        """
        self._check_state(call.line)
        self._place = call
        return self._record(call, Arguments((args, kwargs)), _no_check)

    def operator(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Record what the user's forward does with a placeholder between two blocks.

        Raises:
            RuntimeError: If it needs a value, or cannot be done in micro-batches.
        """
        line = user_line()
        if self.ended:
            raise RuntimeError(
                f"{self.ended} {operators.title(func)} at {line} uses what they return."
            )
        self._check_state(line)
        given = (args, kwargs)
        self._check_edit(func, line, given)
        place = self._place
        assert place is not None, "a block is called before there is a placeholder"
        name, kind = operators.title(func), (func, line)
        call = Call(operators.returning(func), kind, name, line, place.stage, place.device)

        def check(learned: Learned, found: Try) -> None:
            few = self._samples.few
            if why := operators.objection(learned, found, given, self.rows, few):
                self._refuse(func, line, why)

        try:
            made = self._record(call, Arguments(given), check)
        except (Doubt, _Refused):
            raise
        except Exception as error:
            raise self.needs_value(func, line) from error
        target = operators.in_place(func, args, kwargs)
        if isinstance(target, Placeholder):
            target.number = made.number
            return target
        return made

    def needs_value(self, func: Callable[..., Any], line: str = "") -> RuntimeError:
        """The error for an operator that needs the value of a placeholder."""
        return _Refused(
            f"between two blocks of a pipeline, the values that they return are not known: got "
            f"{operators.title(func)} at {line or user_line()}, which needs one. Do this in a "
            "block, where it runs for each micro-batch, or after the last block."
        )

    def shape_of(self, number: int) -> torch.Size:
        """The shape of a value for the whole mini-batch."""
        if number in self.inputs:
            return self.inputs[number][0].shape
        if number not in self._picked:  # made of an input
            return self._scaled(self._samples[number].shape, 1)
        source, k = self._picked[number]
        _, learned = self._calls[source]
        step = self.steps[source]
        leaves = (leaf for _, leaf in leaves_in((step.args, dict(step.kwargs))))
        given = tuple(self.shape_of(x.number) for x in leaves if isinstance(x, Value))
        if given not in learned.shapes:
            if len(learned.shapes) >= _SHAPES:
                learned.shapes.clear()
            sample = self._samples[source]
            values = [sample] if learned.result.single else sample
            pairs = zip(values, learned.result.leaves, strict=True)
            learned.shapes[given] = [
                self._scaled(x.shape, leaf.reading) if isinstance(leaf, TensorLeaf) else None
                for x, leaf in pairs
            ]
        found = learned.shapes[given][k]
        assert found is not None, "placeholders stand for tensors"
        return found

    def _record(self, call: Call, given: Arguments, check: Check) -> Any:
        learned, given, readings, found = self._known(call, given, check)
        lowered = [self._lowered(leaf, readings.get(path), call) for path, leaf in given.leaves]
        args, kwargs = given.replaced(lowered)
        number, objects = self.new(), given.objects
        run = Expecting(call, learned.result, objects)
        self.steps[number] = Step(run, args, number, call.stage, kwargs, call.name, call.line)
        self._calls[number] = call, learned
        if found is not None:
            flat = learned.result.flat(found.result)
            assert flat is not None, "the structure is that of this result"
            self._samples[number] = flat[0] if learned.result.single else flat
        made = enumerate(learned.result.leaves)
        return learned.result.tree([self._made_of(number, k, x, objects) for k, x in made])

    def _made_of(
        self,
        source: int,
        k: int,
        leaf: TensorLeaf | Constant,
        objects: Sequence[tuple[Path, Any]],
    ) -> Any:
        """What the user's forward gets for a leaf of a result."""
        if isinstance(leaf, Constant):
            given = leaf.value
            return dict(objects)[given.path] if isinstance(given, Given) else given
        call, learned = self._calls[source]
        number = source
        if not learned.result.single:
            number = self.new()
            name = f"{call.name}[{k}]"
            step = Step(Pick(k), (Value(source),), number, call.stage, {}, name, call.line)
            self.steps[number] = step
        self._picked[number] = source, k
        made = Placeholder(self, number, leaf)
        self._made.append(weakref.ref(made))
        return made

    def _known(
        self, call: Call, given: Arguments, check: Check
    ) -> tuple[Learned, Arguments, dict[Path, Reading], Try | None]:
        """What is known of a call, its arguments, how they are cut, and what a rehearsal saw."""
        key, found = self._key(call, given), None
        learned = self._knowledge.get(key)
        if learned is None:
            self._expect_filled(call, given)
        readings, unknown = self._readings(given, learned)
        if learned is None or unknown or not (learned.complete or self.single):
            few = self._samples.few
            rehearsal = Rehearsal(call, given, self.rows, few, lambda x: self._samples[x.number])
            before = {} if learned is None else learned.readings
            learned, found = rehearsal.learn(readings, unknown)
            learned.readings = {**before, **learned.readings}
            check(learned, found)
            self._knowledge[key] = learned
            readings, _ = self._readings(given, learned)
        if learned.filled and self.grad:
            empty = Arguments(self._caches.without(call, given.tree, learned.filled))
            return self._known(call, empty, check)
        if learned.filled:
            self._caches.one_by_one(call, learned.filled, self.rows)
            self._make_single()
            found = None  # it may be that of a few rows
            readings, _ = self._readings(given, learned)
        return learned, given, readings, found

    def _expect_filled(self, call: Call, given: Arguments) -> None:
        """Prepare for an object among the arguments that has the rows of the mini-batch already."""
        if not any(True for _, each in given.objects for _ in tensors_held(each)):
            return
        if not self.grad:
            self._make_single()
        elif not any(isinstance(leaf, Placeholder) for _, leaf in given.leaves):
            whole = dict.fromkeys(self._readings(given, None)[0], WHOLE)
            rehearsal = Rehearsal(call, given, self.rows, None, _no_sample)
            learned, _ = rehearsal.learn(whole, [])
            if learned.filled:
                self._caches.without(call, given.tree, learned.filled)

    def _key(self, call: Call, given: Arguments) -> Hashable:
        kinds = tuple([(path, kind_of(leaf)) for path, leaf in given.leaves])
        return call.kind, kinds

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
            if leaf is self._first:
                readings[path] = 1
            elif self.single:
                readings[path] = WHOLE
            else:
                found = reading_of(leaf, self.rows, known.get(path))
                if found is None:
                    unknown.append(path)
                else:
                    readings[path] = found
        return readings, unknown

    def _lowered(self, leaf: Any, reading: Reading | None, call: Call) -> Any:
        """What stands for an argument in a step."""
        if type(leaf) is Placeholder:
            if leaf.recording is not self:
                raise _Refused(
                    f"{call} must be called with what blocks of this call return: got a result of "
                    "another one, whose pipeline has not run."
                )
            return Value(leaf.number)
        return leaf if reading is None else Value(self._input(leaf, reading, call))

    def _input(self, tensor: Tensor, reading: Reading, call: Call) -> int:
        """The number of a tensor from outside."""
        key = id(tensor), reading
        if key not in self._numbers:
            self._tensors.append(tensor)
            self._numbers[key] = number = self.new()
            # Several entries per row are given as one, so that all that is cut has the same rows.
            given = tensor.unflatten(0, (self.rows, reading)) if reading > 1 else tensor
            self.inputs[number] = given, reading
        if reading <= 1:
            return self._numbers[key]
        there = (*key, call.stage)
        if there not in self._numbers:
            self._numbers[there] = number = self.new()
            source = Value(self._numbers[key])
            step = Step(torch.flatten, (source, 0, 1), number, call.stage, {}, "flatten", call.line)
            self.steps[number] = step
        return self._numbers[there]

    def _make_single(self) -> None:
        if not self.single:
            self.single = True
            self._samples = self._new_samples(None)

    def _new_samples(self, few: int | None) -> Samples:
        return Samples(self.steps, self.inputs, self._calls, self.rows, few)

    def _scaled(self, shape: torch.Size, reading: Reading | None) -> torch.Size:
        if not reading or self._samples.few is None:
            return shape
        return torch.Size([reading * self.rows, *shape[1:]])

    def _check_state(self, line: str) -> None:
        now = ThreadState.now(self.device)
        if now != self._state:
            raise _Refused(
                "all blocks of a pipeline run in the same state of the thread: at "
                f"{line} it changes {self._state.changed_to(now)}. Set it around the whole model, "
                "or within a block. A torch.utils.checkpoint around blocks is not needed, since "
                "the pipeline has activation_checkpointing: leave it out, or write "
                "use_reentrant=False."
            )

    def _check_edit(self, func: Callable[..., Any], line: str, given: Any) -> None:
        """Raise if an operator edits a tensor in place that is not in its stage."""
        target = operators.in_place(func, *given)
        if target is None:
            return
        assert self._place is not None
        if not isinstance(target, Placeholder):
            self._refuse(func, line, "edits a tensor in place that was made outside of the blocks")
        elif target.recording is self and self.stage_of(target.number) != self._place.stage:
            self._refuse(func, line, "edits a tensor in place that an earlier stage has")

    def _refuse(self, func: Callable[..., Any], line: str, why: str) -> NoReturn:
        if why == "needs a value":
            raise self.needs_value(func, line)
        raise _Refused(
            "what the forward does between two blocks must work for each micro-batch in its stage: "
            f"{operators.title(func)} at {line} {why}. Do this in a block, or after the last one."
        )


class _Refused(RuntimeError):
    """Raised for what cannot be recorded."""


def _no_sample(placeholder: Placeholder) -> Tensor:
    raise AssertionError("the first block is given no placeholders")


def _no_check(learned: Learned, found: Try) -> None:
    pass
