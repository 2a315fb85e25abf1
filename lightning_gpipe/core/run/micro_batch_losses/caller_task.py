"""The caller's row of a schedule: its code for each micro-batch, with inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Any

from typing_extensions import override

from lightning_gpipe.core.data import FlatTree
from lightning_gpipe.core.faithful import NOTHING, Context, add_note
from lightning_gpipe.core.programs import Program
from lightning_gpipe.core.run.caller import Caller, devices_of
from lightning_gpipe.core.run.micro_batch_losses.user_step import Call, UserStep
from lightning_gpipe.core.run.observe.timeline import Timeline
from lightning_gpipe.core.run.worker import RowTask
from lightning_gpipe.core.schedules import CALLER, Action, Kind
from lightning_gpipe.core.transport import Exchange


def first_call(code: UserStep, timeline: Timeline) -> Call | None:
    """Return the call for the first micro-batch, which has the program of the stages."""
    action = Action(Kind.PREPARE, 0, CALLER)
    try:
        return timeline.run_by_caller(action, code.prepare, action.i)
    except BaseException as error:
        add_note(error, f"raised in {_description(action, code.m)}")
        raise


class CallerTask(RowTask):
    """The caller's row, which runs while the workers run theirs.

    If it has no losses, the code ends at its calls. ``first`` is its call for the first
    micro-batch, at which it is suspended already. Micro-batches may have other programs, as where
    only those with padding have a mask: ``set_program`` is called with the index, the program, and
    whether it has loss terms, before the stages ``told`` may run it. ``at_last_loss`` is called
    after all losses.
    """

    def __init__(
        self,
        timeline: Timeline,
        code: UserStep,
        exchange: Exchange,
        context: Context,
        first: Call,
        set_program: Callable[[int, Program, bool], None],
        told: Collection[int] = (),
        at_last_loss: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(timeline.schedule.caller, exchange, context)
        self._run = timeline.run_by_caller
        self._code = code
        self._first = first
        self._set_program = set_program
        self._told = told
        self._goes_on = any(action.kind is Kind.LOSS for action in self.row)
        self._at_last_loss = at_last_loss
        self._callers: dict[int, Caller] = {}
        self._input_devices: dict[int, FlatTree] = {}

    @override
    def session(self, *, joined: bool = False) -> AbstractContextManager[Any]:
        return NOTHING  # its code enters what it needs, each time

    @override
    def abandon(self) -> None:
        """Do nothing: it has ended when its run has failed."""

    def _prepare(self, action: Action) -> None:
        i = action.i
        call = self._run(action, self._code.prepare, i) if i else self._first
        if call is None:
            raise call_missing(f"one for micro-batch 0, and none for micro-batch {i}")
        if not call.alike(self._first):
            self._set_program(i, call.program, call.terms)
        for j in self._told:
            self._exchange.send(action._replace(j=j), FlatTree([]))
        self._input_devices[i] = devices_of(call.inputs)
        self._callers[i] = Caller(call.program, terms=call.terms)
        send = self._exchange.send_as_told if call.told else self._exchange.send
        for to, value, route in self._callers[i].input(i, call.inputs):
            send(to, value, route)
        if not self._goes_on:
            self._code.leave(i)

    def _finish(self, action: Action) -> None:
        i, caller = action.i, self._callers[action.i]
        outputs = caller.output(self._exchange, i)
        gradients = self._run(action, self._code.finish, i, outputs, caller.presented)
        if self._code.losses.complete:
            self._at_last_loss()
        for to, value, route in caller.output_gradient(i, gradients):
            self._exchange.send(to, value, route)

    def _go_back(self, action: Action) -> None:
        i = action.i
        caller = self._callers.pop(i)
        gradients = caller.input_gradient(self._exchange, self._input_devices.pop(i), i)
        self._run(action, self._code.go_back, i, gradients)

    @override
    def _describe(self, action: Action, error: BaseException) -> str:
        return _description(action, self._code.m)

    _verbs = {  # noqa: RUF012
        Kind.PREPARE: _prepare,
        Kind.LOSS: _finish,
        Kind.BACKWARD: _go_back,
    }


_PARTS = {
    Kind.PREPARE: "training_step before its call of the pipeline",
    Kind.LOSS: "training_step after its call of the pipeline",
    Kind.BACKWARD: "backward of what training_step does before its call of the pipeline",
}


def _description(action: Action, m: int) -> str:
    return f"{_PARTS[action.kind]}, for micro-batch {action.i} of {m}"


def call_missing(calls: str) -> RuntimeError:
    """Return the error for code that calls the pipeline for some micro-batches only."""
    return RuntimeError(
        "training_step must call the pipeline once for each micro-batch, or return None without a "
        f"call for all: got {calls}. schedule='fill_drain' gives it the whole batch."
    )
