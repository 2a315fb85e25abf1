"""The calls of one forward: steps of a program, and placeholders for what they return."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from lightning_gpipe.core.faithful import record
from lightning_gpipe.core.frontends.lines import autograd_function, current_line
from lightning_gpipe.core.frontends.module_list import operators
from lightning_gpipe.core.frontends.module_list.forward_state import CallState, ForwardState
from lightning_gpipe.core.frontends.module_list.rehearsal.learning import (
    CacheRule,
    Check,
    Learner,
    kind_of_call,
)
from lightning_gpipe.core.frontends.module_list.rehearsal.rehearsal import Doubt, Trial
from lightning_gpipe.core.frontends.module_list.rehearsal.samples import Rehearse, Samples
from lightning_gpipe.core.frontends.module_list.tape.arguments import Arguments, Reading
from lightning_gpipe.core.frontends.module_list.tape.calls import (
    Knowledge,
    RecordedCall,
    ReturnedArgument,
    TensorLeaf,
)
from lightning_gpipe.core.frontends.module_list.tape.outside_tensors import OutsideTensors
from lightning_gpipe.core.frontends.module_list.tape.placeholder import Placeholder
from lightning_gpipe.core.frontends.module_list.tape.tape import (
    History,
    Tape,
    TapeEntry,
    same_arguments,
)
from lightning_gpipe.core.programs import Value
from lightning_gpipe.core.transport import FRAMES

_TAPES = 16  # in memory: one for each kind of arguments of the first block


class LoopRecording:
    """Records calls, and answers them with placeholders.

    Args:
        first: The tensor whose dim 0 is the rows of the mini-batch.
        history: What earlier forwards have shown; it grows.
        caches: The rule for objects that blocks fill.
        rehearse: Runs calls of a stage on a few rows, for all processes.

    Attributes:
        inputs: The tensors from outside by number, and how they are cut.
        compares: Whether what calls see is compared with what they would see when they run.
    """

    def __init__(
        self,
        first: Tensor,
        history: History,
        device: torch.device,
        caches: CacheRule,
        state: ForwardState,
        rehearse: Rehearse,
    ) -> None:
        self.tape = Tape()
        self.rows = first.size(0)
        self.device = device
        self.end_reason = ""
        self.compares = True
        self._states: list[CallState] = []
        self.state = state
        self._history = history
        self.inputs: dict[int, tuple[Tensor, Reading]] = {}
        self._rehearse = rehearse
        self.samples = Samples(self.tape, self.inputs, self.rows, self._rehearsed)
        self._learner = Learner(first, history.knowledge, caches, self.samples, state.grad)
        self.outsides = OutsideTensors(self.inputs, self.rows, self._learner.reading)
        self._count = 0  # the number of calls so far
        self._first_kind: Hashable = None  # of call
        self._placeholders: list[weakref.ref[Placeholder]] = []
        self._latest: RecordedCall | None = None

    @property
    def alive(self) -> list[Placeholder]:
        """The placeholders that something still refers to, in order; the same in all processes.

        Frames of this thread that another one looks at would keep some: not while this is read.
        """
        with FRAMES:
            return [x for ref in self._placeholders if (x := ref()) is not None]

    def remember(self) -> None:
        """Let later forwards follow the tape, now that it is complete."""
        if self.tape.reusable:
            record(self._history.tapes, self._first_kind, self.tape, _TAPES)

    def _compare(self, call: RecordedCall, arguments: Arguments | None = None) -> None:
        if self.compares and (call.modules or arguments is not None):
            self._states.append(CallState(call, arguments))

    def check_states(self) -> None:
        """Refuse what a call would see when it runs, and did not see when it was recorded."""
        for state in self._states:
            state.check()

    def end(self, reason: str) -> None:
        self.end_reason = reason
        self._placeholders, self._states = [], []
        self._use(Tape())
        self.outsides.clear()
        self.samples.clear()
        self.inputs.clear()  # in a cycle of objects they would outlive it

    def follow(
        self, run: Any, kind: Hashable, line: str, arguments: tuple[Any, Any]
    ) -> TapeEntry | None:
        """Go on to the next call on the tape, if it is this one."""
        entries = self.tape.entries
        if self._count == len(entries):
            return None
        entry = entries[self._count]
        call = entry.call
        fits = (
            line == call.line
            and run == call.run
            and kind == call.kind
            and same_arguments(entry.arguments, arguments, self)
        )
        if self.outsides.undecided:
            self.outsides.settle(accept=fits)
        if not fits:
            return None
        self._latest = call
        self._count += 1
        self._compare(call)
        return entry

    def record(
        self, call: RecordedCall, arguments: tuple[Any, Any], check: Check | None = None
    ) -> Any:
        """Record a call, or follow the tape; return what it will return, with placeholders."""
        self._latest = call
        if not self._count:
            self._first_kind = self.samples.single, kind_of_call(call, Arguments(arguments))
            tape = self._history.tapes.get(self._first_kind)
            self._use(Tape() if tape is None or tape.rows < self.rows else tape)
        entry = self.follow(call.run, call.kind, call.line, arguments)
        if entry is None:
            entry = self._learned(call, arguments, check)
        return self.answer(entry, arguments)

    def operator(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        line, name = current_line(), operators.title(func)
        if self.end_reason:
            raise RuntimeError(f"{self.end_reason} {name} at {line} uses what they return.")
        self._check_state(line)
        assert self._latest is not None, "a block is called before there is a placeholder"
        stage, device = self._latest.stage, self._latest.device
        args = operators.for_any_rows(func, args, self.rows)
        target = operators.in_place(func, args, kwargs)
        if isinstance(target, Placeholder):
            if target.recording is self and self.tape.steps[target.number].stage != stage:
                raise operators.refused(func, line, operators.EDITS_EARLIER)
        elif target is not None:
            raise operators.refused(func, line, operators.EDITS_OUTSIDE)

        def check(knowledge: Knowledge, trial: Trial) -> None:
            if why := operators.objection(knowledge, trial):
                raise operators.refused(func, line, why)

        call = RecordedCall(operators.returning(func), (func, line), name, line, stage, device)
        try:
            result = self.record(call, (args, kwargs), check)
        except (Doubt, operators.NotRecordable):
            raise
        except Exception as error:
            raise operators.needs_value(func, line) from error
        if isinstance(target, Placeholder):
            target.number = result.number
            return target
        return result

    def _check_state(self, line: str) -> None:
        if self.state.grad and not torch.is_grad_enabled() and (function := autograd_function()):
            raise operators.loses_backward(function)
        self.state.check(self.device, line)

    def needs_value(self, func: Callable[..., Any]) -> RuntimeError:
        if self.state.grad and (function := autograd_function()):
            return operators.loses_backward(function)
        return operators.needs_value(func, current_line())

    def answer(self, entry: TapeEntry, arguments: tuple[Any, Any]) -> Any:
        """Return what the user's forward gets for a call on the tape."""
        result, numbers = entry.knowledge.result, entry.numbers
        if result.single:
            return self._placeholder(numbers[0], result.leaves[0])
        objects = dict(Arguments(arguments).objects) if result.has_arguments else {}
        leaves: list[Any] = []
        for number, leaf in zip(numbers, result.leaves, strict=True):
            if isinstance(leaf, TensorLeaf):
                leaf = self._placeholder(number, leaf)
            elif isinstance(leaf, ReturnedArgument):
                leaf = objects[leaf.path]
            leaves.append(leaf)
        return result.tree(leaves)

    def _placeholder(self, number: int, leaf: TensorLeaf) -> Placeholder:
        placeholder = Placeholder(self, number, leaf)
        self._placeholders.append(weakref.ref(placeholder))
        return placeholder

    def _learned(
        self, call: RecordedCall, arguments: tuple[Any, Any], check: Check | None
    ) -> TapeEntry:
        if self.tape.programs:
            self._use(self.tape.until(self._count))
            self.outsides.number_as_on(self.tape)
        knowledge, inputs, readings, trial = self._learner.learn(call, Arguments(arguments), check)
        leaves = [
            self._describe(leaf, readings.get(path), knowledge.readings.get(path), call)
            for path, leaf in inputs.leaves
        ]
        number = self.tape.add(call, inputs, leaves, knowledge)
        if trial is not None:
            flat = knowledge.result.flat(trial.result)
            assert flat is not None, "the structure is that of this result"
            self.samples[number] = flat[0] if knowledge.result.single else flat
        self._count += 1
        self._compare(call, inputs)
        return self.tape.entries[-1]

    def _rehearsed(self, stage: int, function: Callable[[], Any]) -> Any:
        """Run a function in the process of a stage, which may edit the blocks."""
        self.check_states()
        result = self._rehearse(stage, function)
        for state in self._states:
            state.renew()
        return result

    def _use(self, tape: Tape) -> None:
        self.tape = tape
        self.samples.tape = tape

    def _describe(
        self,
        leaf: Any,
        reading: Reading | None,
        learned_reading: Reading | None,
        call: RecordedCall,
    ) -> Any:
        if type(leaf) is Placeholder:
            if leaf.recording is not self:
                raise operators.NotRecordable(
                    f"{call} must be called with what blocks of this call return: got a result of "
                    "another one, whose pipeline has not run."
                )
            return Value(leaf.number)
        if reading is None:
            return leaf
        return self.outsides.describe(leaf, reading, learned_reading, call, self.tape)
