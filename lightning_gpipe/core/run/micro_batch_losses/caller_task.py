"""The caller's row of a schedule: its code for each micro-batch, with inputs and outputs."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from typing_extensions import override

from lightning_gpipe.core.data import FlatTree
from lightning_gpipe.core.faithful import NOTHING, Context, add_note
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

    ``first`` is its call for the first micro-batch, at which it is suspended already.
    """

    def __init__(
        self,
        timeline: Timeline,
        code: UserStep,
        caller: Caller,
        exchange: Exchange,
        context: Context,
        first: Call,
    ) -> None:
        super().__init__(timeline.schedule.caller, exchange, context)
        self._run = timeline.run_by_caller
        self._code = code
        self._caller = caller
        self._first = first
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
        if i and call.program.fingerprint != self._first.program.fingerprint:
            raise RuntimeError(
                "training_step must run the same layers for each micro-batch: it ran others for "
                f"micro-batch {i} than for micro-batch 0. schedule='fill_drain' gives it the whole "
                "batch."
            )
        self._input_devices[i] = devices_of(call.inputs)
        for to, value, route in self._caller.input(i, call.inputs):
            self._exchange.send(to, value, route)
        if not i:
            self._first = Call(FlatTree([]), call.program)  # its tensors are not held here

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
        gradients = self._caller.input_gradient(self._exchange, self._input_devices.pop(i), i)
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
    """The error for code that calls the pipeline for some micro-batches only."""
    return RuntimeError(
        "training_step must call the pipeline once for each micro-batch, or return None without a "
        f"call for all: got {calls}. schedule='fill_drain' gives it the whole batch."
    )
