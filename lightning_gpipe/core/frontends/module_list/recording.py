"""The calls of one forward: steps of a program, and placeholders for what they return."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_gpipe.core.frontends.lines import current_line
from lightning_gpipe.core.frontends.module_list import operators
from lightning_gpipe.core.frontends.module_list.arguments import (
    Arguments,
    Path,
    Reading,
)
from lightning_gpipe.core.frontends.module_list.caches import CacheRule
from lightning_gpipe.core.frontends.module_list.calls import Call, Expected, Learned, Pick
from lightning_gpipe.core.frontends.module_list.expected import Outside
from lightning_gpipe.core.frontends.module_list.learning import Check, Learner, kind_of_call
from lightning_gpipe.core.frontends.module_list.outsides import Outsides
from lightning_gpipe.core.frontends.module_list.packing import taken_apart
from lightning_gpipe.core.frontends.module_list.placeholder import Placeholder
from lightning_gpipe.core.frontends.module_list.refusals import (
    Refused,
    needs_value,
    other_state,
    refused_operator,
)
from lightning_gpipe.core.frontends.module_list.rehearsal import Doubt, Try
from lightning_gpipe.core.frontends.module_list.remembered import Remembered
from lightning_gpipe.core.frontends.module_list.results import Constant, Given, Result, TensorLeaf
from lightning_gpipe.core.frontends.module_list.samples import Rehearse, Samples
from lightning_gpipe.core.frontends.module_list.tape import Entry, Tape
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
        rehearse: Runs calls of a stage on a few rows, for all processes.

    Attributes:
        tape: What was recorded.
        outsides: The tensors from outside.
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
        rehearse: Rehearse,
    ) -> None:
        self.tape = Tape()
        self.rows = first.size(0)
        self.device = device
        self.grad = state.grad
        self.ended = ""
        self._state = state
        self._remembered = remembered
        self.inputs: dict[int, tuple[Tensor, Reading]] = {}
        self._samples = Samples(self.tape, self.inputs, self.rows, rehearse)
        self._learner = Learner(
            first, remembered.learned, caches, self._samples, rehearse, grad=state.grad
        )
        self.outsides = Outsides(self.inputs, self.rows, self._learner.reading)
        self._at = 0  # the number of calls so far
        self._begun: Hashable = None  # what the first one is like
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
        self._made = []
        self._use(Tape())
        self.outsides.clear()
        self._samples.clear()

    def check_state(self, line: str) -> None:
        """Refuse a thread whose state is another one than when the forward began.

        Raises:
            RuntimeError: If grad mode, autocast or hooks on saved tensors are others than before.
        """
        if not self._state.holds(self.device):
            now = ThreadState.now(self.device)
            raise other_state(self._state.changed_to(now), line)

    def follow(self, run: Any, kind: Hashable, line: str, given: tuple[Any, Any]) -> Entry | None:
        """Go on to the next call on the tape, if it is this one.

        Args:
            run: What is called.
            kind: Its kind.
            line: The line that calls it.
            given: Its ``(args, kwargs)``.
        """
        entries = self.tape.entries
        if self._at == len(entries):
            return None
        entry = entries[self._at]
        call, (args_fit, kwargs_fit), (args, kwargs) = entry.call, entry.patterns, given
        fits = (
            line == call.line
            and run == call.run
            and kind == call.kind
            and args_fit(args, self)
            and kwargs_fit(kwargs, self)
        )
        if self.outsides.undecided:
            self.outsides.settle(accept=fits)
        if not fits:
            return None
        self._place = call
        self._at += 1
        return entry

    def block(self, call: Call, given: tuple[Any, Any]) -> Any:
        """Record the call of a block that :meth:`follow` has not found on the tape.

        Returns:
            What it will return, with placeholders for tensors.
        """
        self._place = call
        return self._record(call, given, _no_check)

    def operator(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Record what the user's forward does with a placeholder between two blocks.

        Raises:
            RuntimeError: If it needs a value, or cannot be done in micro-batches.
        """
        line = current_line()
        if self.ended:
            raise RuntimeError(
                f"{self.ended} {operators.title(func)} at {line} uses what they return."
            )
        self.check_state(line)
        given = (args, kwargs)
        self._check_edit(func, line, given)
        place = self._place
        assert place is not None, "a block is called before there is a placeholder"
        name, kind = operators.title(func), (func, line)
        call = Call(operators.returning(func), kind, name, line, place.stage, place.device)

        def check(learned: Learned, found: Try) -> None:
            few = self._samples.few
            if why := operators.objection(learned, found, given, self.rows, few):
                raise refused_operator(func, line, why)

        try:
            made = self._record(call, given, check)
        except (Doubt, Refused):
            raise
        except Exception as error:
            raise needs_value(func, line) from error
        target = operators.in_place(func, args, kwargs)
        if isinstance(target, Placeholder):
            target.number = made.number
            return target
        return made

    def needs_value(self, func: Callable[..., Any]) -> RuntimeError:
        """The error for an operator that needs the value of a placeholder."""
        return needs_value(func, current_line())

    def shape_of(self, number: int) -> torch.Size:
        """The shape of a value for the whole mini-batch."""
        return self._samples.shape_of(number)

    def _record(self, call: Call, given: tuple[Any, Any], check: Check) -> Any:
        if not self._at:
            self._begun = self.single, kind_of_call(call, Arguments(given))
            self._use(self._remembered.tape(self._begun))
        entry = self.follow(call.run, call.kind, call.line, given)
        if entry is None:
            entry, given = self._packed_or_new(call, given, check)
        return self.answer(entry, given)

    def _packed_or_new(
        self, call: Call, given: tuple[Any, Any], check: Check
    ) -> tuple[Entry, tuple[Any, Any]]:
        """The entry of a call that the tape does not have as it is, and its arguments there."""
        parts = taken_apart(call, given, None if self.single or not self.grad else self.rows)
        if parts is not None:
            call, given = parts
            entry = self.follow(call.run, call.kind, call.line, given)
            if entry is not None:
                return entry, given
        if self.tape.closed:
            self._use(self.tape.until(self._at))
            self.outsides.number_as_on(self.tape)
        self._add(call, Arguments(given), check)
        self._at += 1
        return self.tape.entries[-1], given

    def _use(self, tape: Tape) -> None:
        self.tape = tape
        self._samples.tape = tape

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
        checked = Expected(call.name, learned.result, objects).checked
        tape.steps[number] = Step(
            call.run, args, number, call.stage, kwargs, call.name, call.line, checked
        )
        tape.calls[number] = call, learned
        if found is not None:
            flat = learned.result.flat(found.result)
            assert flat is not None, "the structure is that of this result"
            self._samples[number] = flat[0] if learned.result.single else flat
        numbers = self._pick(number, call, learned.result)
        tape.entries.append(Entry(call, given.replaced(described), learned, numbers, tape.count))
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

    def answer(self, entry: Entry, given: tuple[Any, Any]) -> Any:
        """What the user's forward gets for a call on the tape."""
        result, numbers = entry.learned.result, entry.numbers
        if result.single:
            [leaf] = result.leaves
            assert isinstance(leaf, TensorLeaf), "a result that is no tree is a tensor"
            return self._placeholder(numbers[0], leaf)
        objects = Arguments(given).objects if result.gives else ()
        pairs = zip(numbers, result.leaves, strict=True)
        return result.tree([self._made_of(number, leaf, objects) for number, leaf in pairs])

    def _made_of(
        self, number: int, leaf: TensorLeaf | Constant, objects: Sequence[tuple[Path, Any]]
    ) -> Any:
        if isinstance(leaf, Constant):
            given = leaf.value
            return dict(objects)[given.path] if isinstance(given, Given) else given
        return self._placeholder(number, leaf)

    def _placeholder(self, number: int, leaf: TensorLeaf) -> Placeholder:
        made = Placeholder(self, number, leaf)
        self._made.append(weakref.ref(made))
        return made

    def _described(
        self, leaf: Any, reading: Reading | None, learned: Reading | None, call: Call
    ) -> Any:
        """What stands for an argument on the tape."""
        if type(leaf) is Placeholder:
            if leaf.recording is not self:
                raise Refused(
                    f"{call} must be called with what blocks of this call return: got a result of "
                    "another one, whose pipeline has not run."
                )
            return Value(leaf.number)
        if reading is None:
            return leaf
        return self.outsides.described(leaf, reading, learned, call, self.tape)

    def _check_edit(self, func: Callable[..., Any], line: str, given: Any) -> None:
        """Raise if an operator edits a tensor in place that is not in its stage."""
        target = operators.in_place(func, *given)
        if target is None:
            return
        assert self._place is not None
        if not isinstance(target, Placeholder):
            raise refused_operator(func, line, operators.EDITS_OUTSIDE)
        if target.recording is self and self.tape.steps[target.number].stage != self._place.stage:
            raise refused_operator(func, line, "edits a tensor in place that an earlier stage has")


def _no_check(learned: Learned, found: Try) -> None:
    pass
