"""The caller's row of a schedule: its code, micro-batch by micro-batch, and what that is sent."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_gpipe.core.data import FlatTree
from lightning_gpipe.core.faithful import NOTHING, Context, add_note
from lightning_gpipe.core.plan import CALLER, Action, Kind
from lightning_gpipe.core.run.caller import Caller
from lightning_gpipe.core.run.code import Call, Code
from lightning_gpipe.core.run.timeline import Timeline
from lightning_gpipe.core.transport import Cancelled, Exchange, Task

T = TypeVar("T")


def first_call(code: Code, timeline: Timeline) -> Call | None:
    """The call for the first micro-batch, which tells what the stages are to run."""
    action = Action(Kind.PREPARE, 0, CALLER)

    def prepare(action: Action) -> Call | None:
        return timeline.run_by_caller(action, code.prepare, action.i)

    return _noted(prepare, action, code.m)


class CallersRow(Task):
    """What the caller does while the workers run, in order.

    Args:
        timeline: Has the schedule, and gets what ran when.
        code: The caller's code.
        caller: Its end of the pipeline.
        exchange: What connects it with the workers.
        context: Its thread-local state.
        first: The call for the first micro-batch, which was made already.
    """

    def __init__(
        self,
        timeline: Timeline,
        code: Code,
        caller: Caller,
        exchange: Exchange,
        context: Context,
        first: Call,
    ) -> None:
        self._row = timeline.schedule.caller
        self._run = timeline.run_by_caller
        self._code = code
        self._caller = caller
        self._exchange = exchange
        self._context = context
        self._first = first
        self._inputs: dict[int, FlatTree] = {}  # the device of each leaf in its place

    @property
    @override
    def row(self) -> Sequence[Action]:
        return self._row

    @property
    @override
    def variables(self) -> contextvars.Context:
        return self._context.variables

    @override
    def session(self, *, joined: bool = False) -> AbstractContextManager[Any]:
        return NOTHING  # its code enters what it needs, each time

    @override
    def perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            self._exchange.check()
            _noted(partial(_VERBS[action.kind], self), action, self._code.m)

    @override
    def abandon(self) -> None:
        """Do nothing: it has ended when its run has failed."""

    def _prepare(self, action: Action) -> None:
        i = action.i
        call = self._run(action, self._code.prepare, i) if i else self._first
        if call is None:
            raise RuntimeError(
                "training_step must call the pipeline once for each micro-batch, or return None "
                "without a call for all: got one for micro-batch 0, and none for micro-batch "
                f"{i}. schedule='fill_drain' gives it the whole batch."
            )
        if i and not _same_program(call, self._first):
            raise RuntimeError(
                "training_step must run the same layers for each micro-batch: it ran others for "
                f"micro-batch {i} than for micro-batch 0. schedule='fill_drain' gives it the whole "
                "batch."
            )
        leaves, spec = call.inputs
        self._inputs[i] = FlatTree([_device_of(leaf) for leaf in leaves], spec)
        for to, value, route in self._caller.input(i, call.inputs):
            self._exchange.send(to, value, route)
        if not i:
            self._first = Call(FlatTree([], spec), call.program)  # its tensors are not held here

    def _finish(self, action: Action) -> None:
        i = action.i
        outputs = self._caller.output(self._exchange, i)
        gradients = self._run(action, self._code.finish, i, outputs, self._presented)
        for to, value, route in self._caller.output_gradient(i, gradients):
            self._exchange.send(to, value, route)

    def _presented(self, outputs: FlatTree) -> FlatTree:
        [[output], _] = self._caller.split([outputs])
        return output

    def _go_back(self, action: Action) -> None:
        i = action.i
        gradients = self._caller.input_gradient(self._exchange, self._inputs.pop(i), i)
        self._run(action, self._code.go_back, i, gradients)


_VERBS: dict[Kind, Callable[[CallersRow, Action], None]] = {
    Kind.PREPARE: CallersRow._prepare,
    Kind.LOSS: CallersRow._finish,
    Kind.BACKWARD: CallersRow._go_back,
}

_PARTS = {
    Kind.PREPARE: "training_step before its call of the pipeline",
    Kind.LOSS: "training_step after its call of the pipeline",
    Kind.BACKWARD: "backward of what training_step does before its call of the pipeline",
}


def _noted(run: Callable[[Action], T], action: Action, m: int) -> T:
    """Run an action; what it raises gets a note of where it happened."""
    try:
        return run(action)
    except BaseException as error:
        if not isinstance(error, Cancelled):
            part = _PARTS[action.kind]
            add_note(error, f"raised in {part}, for micro-batch {action.i} of {m}")
        raise


def _same_program(one: Call, other: Call) -> bool:
    if one.program is None or other.program is None:
        return one.program is other.program
    return one.program.fingerprint == other.program.fingerprint


def _device_of(leaf: Any) -> torch.device | None:
    return leaf.device if isinstance(leaf, Tensor) else None
