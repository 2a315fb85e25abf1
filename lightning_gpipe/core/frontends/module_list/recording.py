"""The calls of one forward: steps of a program, and placeholders for what they return."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from lightning_gpipe.core.frontends.module_list import operators
from lightning_gpipe.core.frontends.module_list.arguments import (
    Arguments,
    Path,
    Reading,
)
from lightning_gpipe.core.frontends.module_list.caches import CacheRule
from lightning_gpipe.core.frontends.module_list.calls import Call, Expecting, Learned, Pick
from lightning_gpipe.core.frontends.module_list.learning import Check, Learner, kind_of_call
from lightning_gpipe.core.frontends.module_list.lines import user_line
from lightning_gpipe.core.frontends.module_list.placeholder import Placeholder
from lightning_gpipe.core.frontends.module_list.rehearsal import Doubt, Try
from lightning_gpipe.core.frontends.module_list.remembered import Remembered
from lightning_gpipe.core.frontends.module_list.results import Constant, Given, Result, TensorLeaf
from lightning_gpipe.core.frontends.module_list.samples import Samples
from lightning_gpipe.core.frontends.module_list.tape import Entry, Outside, Tape, same_constant
from lightning_gpipe.core.frontends.module_list.thread_state import ThreadState
from lightning_gpipe.core.plan import Step, Value


class Recording:
    """Records calls, and answers them with placeholders.

    Args:
        first: The tensor whose dim 0 is the rows of the mini-batch.
        remembered: What earlier forwards have shown; it grows.
        device: Where the values of placeholders will be.
        caches: What to do about objects that blocks fill.
        state: The state of the thread in which the forward began.

    Attributes:
        tape: What was recorded.
        inputs: The tensors from outside by number, and how they are cut.
        rows: The number of rows.
        grad: Whether gradients are recorded.
        ended: Why nothing can be recorded any more, if so.
    """

    def __init__(
        self,
        first: Tensor,
        remembered: Remembered,
        device: torch.device,
        caches: CacheRule,
        state: ThreadState,
    ) -> None:
        self.tape = Tape()
        self.inputs: dict[int, tuple[Tensor, Reading]] = {}
        self.rows = first.size(0)
        self.device = device
        self.grad = state.grad
        self.ended = ""
        self._state = state
        self._remembered = remembered
        self._samples = Samples(self.tape, self.inputs, self.rows)
        self._learner = Learner(first, remembered.learned, caches, self._samples, grad=state.grad)
        self._at = 0  # the number of calls so far
        self._begun: Hashable = None  # what the first one is like
        self._tensors: dict[int, Tensor] = {}  # the inputs as they were given
        self._numbers: dict[Hashable, int] = {}
        self._made: list[weakref.ref[Placeholder]] = []
        self._place: Call | None = None

    @property
    def alive(self) -> list[Placeholder]:
        """The placeholders that something still refers to, in order."""
        return [each for ref in self._made if (each := ref()) is not None]

    @property
    def single(self) -> bool:
        """Whether the program must run in one micro-batch."""
        return self._learner.single

    def remember(self) -> None:
        """Let later forwards follow what was recorded, now that all of it has run."""
        if self.tape.reusable:
            self._remembered.keep(self._begun, self.tape)

    def end(self, reason: str) -> None:
        """Record nothing any more, and free everything."""
        self.ended = reason
        self.tape = Tape()
        self.inputs, self._tensors, self._numbers, self._made = {}, {}, {}, []
        self._samples = Samples(self.tape, self.inputs, self.rows)

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
        return self._samples.shape_of(number)

    def _record(self, call: Call, given: Arguments, check: Check) -> Any:
        if not self._at:
            self._begun = self.single, kind_of_call(call, given)
            self._use(self._remembered.tape(self._begun))
        if self._at == len(self.tape.entries) or not self._follows(call, given):
            if self.tape.closed:
                self._leave()
            self._add(call, given, check)
        entry = self.tape.entries[self._at]
        self._at += 1
        return self._answer(entry, given.objects if entry.learned.result.gives else ())

    def _use(self, tape: Tape) -> None:
        self.tape = tape
        self._samples.tape = tape

    def _leave(self) -> None:
        """Follow the tape no longer."""
        self._use(self.tape.until(self._at))
        outsides = (
            (entry.call.stage, each)
            for entry in self.tape.entries
            for each in entry.given
            if type(each) is Outside
        )
        for stage, each in outsides:
            key = id(self._tensors[each.source]), each.reading
            self._numbers[key] = each.source
            if each.number != each.source:
                self._numbers[(*key, stage)] = each.number

    def _follows(self, call: Call, given: Arguments) -> bool:
        """Whether a call is that of the tape at this place; if so, its tensors are taken."""
        entry = self.tape.entries[self._at]
        if not entry.is_of(call, given):
            return False
        tensors: dict[int, tuple[Tensor, Reading]] = {}
        for (_, leaf), expected in zip(given.leaves, entry.given, strict=True):
            kind = type(expected)
            if type(leaf) is Placeholder:
                mine = kind is Value and leaf.number == expected.number
                if not (mine and leaf.recording is self):
                    return False
            elif kind is Outside:
                if not (isinstance(leaf, Tensor) and self._is_expected(leaf, expected, tensors)):
                    return False
                tensors[expected.source] = leaf, expected.reading
            elif kind is Value or isinstance(leaf, Tensor) or not same_constant(leaf, expected):
                return False
        for number, (tensor, reading) in tensors.items():
            self._take(number, tensor, reading)
        return True

    def _is_expected(self, tensor: Tensor, expected: Outside, others: Mapping[int, Any]) -> bool:
        """Whether a tensor from outside is cut as expected, and the same one as before."""
        if not expected.fits(tensor):
            return False
        before = self._tensors.get(expected.source)
        if before is None and expected.source in others:
            before = others[expected.source][0]
        if before is not None and before is not tensor:
            return False
        return self._learner.reading(tensor, expected.learned) == expected.reading

    def _add(self, call: Call, given: Arguments, check: Check) -> None:
        """Add a call to the tape."""
        tape = self.tape
        learned, given, readings, found = self._learner.known(call, given, check)
        described = [
            self._described(leaf, readings.get(path), learned.readings.get(path), call)
            for path, leaf in given.leaves
        ]
        lowered = (Value(each.number) if type(each) is Outside else each for each in described)
        args, kwargs = given.replaced(lowered)
        number, objects = tape.new(), given.objects
        run = Expecting(call, learned.result, objects)
        tape.steps[number] = Step(run, args, number, call.stage, kwargs, call.name, call.line)
        tape.calls[number] = call, learned
        if found is not None:
            flat = learned.result.flat(found.result)
            assert flat is not None, "the structure is that of this result"
            self._samples[number] = flat[0] if learned.result.single else flat
        numbers = self._pick(number, call, learned.result)
        tape.entries.append(Entry(call, given.structure, described, learned, numbers, tape.count))
        if objects:  # which live as long as their forward, and are others in the next
            tape.reusable = False

    def _pick(self, source: int, call: Call, result: Result) -> list[int]:
        """The numbers of the leaves of a result."""
        tape, numbers = self.tape, []
        for k, leaf in enumerate(result.leaves):
            number = source
            if not result.single and isinstance(leaf, TensorLeaf):
                number = tape.new()
                name = f"{call.name}[{k}]"
                step = Step(Pick(k), (Value(source),), number, call.stage, {}, name, call.line)
                tape.steps[number] = step
            if isinstance(leaf, TensorLeaf):
                tape.picked[number] = source, k
            numbers.append(number)
        return numbers

    def _answer(self, entry: Entry, objects: Sequence[tuple[Path, Any]]) -> Any:
        """What the user's forward gets."""
        result = entry.learned.result
        pairs = zip(entry.numbers, result.leaves, strict=True)
        return result.tree([self._made_of(number, leaf, objects) for number, leaf in pairs])

    def _made_of(
        self, number: int, leaf: TensorLeaf | Constant, objects: Sequence[tuple[Path, Any]]
    ) -> Any:
        if isinstance(leaf, Constant):
            given = leaf.value
            return dict(objects)[given.path] if isinstance(given, Given) else given
        made = Placeholder(self, number, leaf)
        self._made.append(weakref.ref(made))
        return made

    def _described(
        self, leaf: Any, reading: Reading | None, learned: Reading | None, call: Call
    ) -> Any:
        """What stands for an argument on the tape."""
        if type(leaf) is Placeholder:
            if leaf.recording is not self:
                raise _Refused(
                    f"{call} must be called with what blocks of this call return: got a result of "
                    "another one, whose pipeline has not run."
                )
            return Value(leaf.number)
        if reading is None:
            return leaf
        source, number = self._input(leaf, reading, call)
        return Outside(number, source, reading, learned, leaf.dtype, leaf.dim())

    def _input(self, tensor: Tensor, reading: Reading, call: Call) -> tuple[int, int]:
        """The numbers of a tensor from outside: of the input, and of what a stage gets."""
        key = id(tensor), reading
        if key not in self._numbers:
            self._numbers[key] = self.tape.new()
            self._take(self._numbers[key], tensor, reading)
        source = self._numbers[key]
        if reading <= 1:
            return source, source
        there = (*key, call.stage)
        if there not in self._numbers:
            self._numbers[there] = number = self.tape.new()
            given = (Value(source), 0, 1)
            step = Step(torch.flatten, given, number, call.stage, {}, "flatten", call.line)
            self.tape.steps[number] = step
        return source, self._numbers[there]

    def _take(self, number: int, tensor: Tensor, reading: Reading) -> None:
        """Make a tensor from outside the input of this number."""
        self._tensors[number] = tensor
        # Several entries per row are given as one, so that all that is cut has the same rows.
        given = tensor.unflatten(0, (self.rows, reading)) if reading > 1 else tensor
        self.inputs[number] = given, reading

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
        elif target.recording is self and self._stage_of(target.number) != self._place.stage:
            self._refuse(func, line, "edits a tensor in place that an earlier stage has")

    def _stage_of(self, number: int) -> int:
        return self.tape.steps[number].stage

    def _refuse(self, func: Callable[..., Any], line: str, why: str) -> NoReturn:
        if why == "needs a value":
            raise self.needs_value(func, line)
        raise _Refused(
            "what the forward does between two blocks must work for each micro-batch in its stage: "
            f"{operators.title(func)} at {line} {why}. Do this in a block, or after the last one."
        )


class _Refused(RuntimeError):
    """Raised for what cannot be recorded."""


def _no_check(learned: Learned, found: Try) -> None:
    pass
