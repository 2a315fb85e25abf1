"""The caller's row of a schedule: its code for each micro-batch, with inputs and outputs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from typing_extensions import override

from lightning_gpipe.core.data import FlatTree
from lightning_gpipe.core.faithful import NOTHING, Context, add_note
from lightning_gpipe.core.run.backward.sums import Gradients
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


class _Open(NamedTuple):
    """A call whose backward has not come, and the devices of the leaves of its inputs."""

    caller: Caller
    input_devices: FlatTree


class CallerTask(RowTask):
    """The caller's row, which runs while the workers run theirs.

    If it has no losses, the code ends at its calls. ``first`` is its call for the first
    micro-batch, at which it is suspended already. Micro-batches may have other programs, as where
    only those with padding have a mask: ``set_call`` is called with a call and the index of its
    micro-batch, None for all, before the stages ``told`` may run it. ``at_last_loss`` is called
    after all losses.
    """

    def __init__(
        self,
        timeline: Timeline,
        code: UserStep,
        exchange: Exchange,
        context: Context,
        first: Call,
        set_call: Callable[[Call, int | None], None],
        told: Collection[int],
        at_last_loss: Callable[[], None],
    ) -> None:
        super().__init__(timeline.schedule.caller, exchange, context)
        self._run = timeline.run_by_caller
        self._code = code
        self._first = {first.program.stages: first}  # of each module
        self._set_call = set_call
        self._told = told
        self._goes_on = any(action.kind is Kind.LOSS for action in self.row)
        self._at_last_loss = at_last_loss
        self._open: dict[int, list[_Open]] = defaultdict(list)

    @override
    def session(self, *, joined: bool = False) -> AbstractContextManager[Any]:
        return NOTHING  # its code enters what it needs, each time

    @override
    def abandon(self) -> None:
        """Do nothing: it has ended when its run has failed."""

    def _prepare(self, action: Action) -> None:
        i, first = action.i, next(iter(self._first.values()))
        if action.j != CALLER:
            call = self._with_outputs(action, self._code.go_on)
        else:
            call = self._run(action, self._code.prepare, i) if i else first
        if call is None:
            raise call_missing(f"one for micro-batch 0, and none for micro-batch {i}")
        stages = call.program.stages
        if stages not in self._first:
            self._first[stages] = call
            self._set_call(call, None)
        elif not call.alike(self._first[stages]):
            self._set_call(call, i)
        for j in filter(stages.__contains__, self._told):
            self._exchange.send(action._replace(j=j), FlatTree([]))
        caller = Caller(call.program, stages, terms=call.terms)
        self._open[i].append(_Open(caller, devices_of(call.inputs)))
        send = self._exchange.send_as_told if call.told else self._exchange.send
        for to, value, route in caller.input(i, call.inputs):
            send(to, value, route)
        if not self._goes_on:
            self._code.leave(i)

    def _finish(self, action: Action) -> None:
        gradients = self._with_outputs(action, self._code.finish)
        if self._code.losses.complete:
            self._at_last_loss()
        self._send_gradients(action.i, gradients)

    def _go_back(self, action: Action) -> None:
        i = action.i
        caller, devices = self._open[i].pop()
        received = caller.input_gradient(self._exchange, devices, i)
        gradients = self._run(action, self._code.go_back, i, received)
        if self._open[i]:
            self._send_gradients(i, gradients)

    def _with_outputs(self, action: Action, run: Callable[..., Any]) -> Any:
        """Run the code on with the outputs of its latest call."""
        caller = self._open[action.i][-1].caller
        outputs = caller.output(self._exchange, action.i)
        return self._run(action, run, action.i, outputs, caller.presented)

    def _send_gradients(self, i: int, gradients: Gradients) -> None:
        for to, value, route in self._open[i][-1].caller.output_gradient(i, gradients):
            self._exchange.send(to, value, route)

    @override
    def _describe(self, action: Action, error: BaseException) -> str:
        return _description(action, self._code.m)

    _verbs = {  # noqa: RUF012
        Kind.PREPARE: _prepare,
        Kind.LOSS: _finish,
        Kind.CODE: _go_back,
        Kind.BACKWARD: _go_back,
    }


_PARTS = {
    Kind.PREPARE: "training_step before its call of the pipeline",
    Kind.LOSS: "training_step after its call of the pipeline",
    Kind.CODE: "backward of what training_step does between its calls of two modules",
    Kind.BACKWARD: "backward of what training_step does before its call of the pipeline",
}


def _description(action: Action, m: int) -> str:
    part = _PARTS[action.kind]
    if action.kind is Kind.PREPARE and action.j != CALLER:
        part = "training_step between its calls of two modules"
    return f"{part}, for micro-batch {action.i} of {m}"


def call_missing(calls: str) -> RuntimeError:
    """Return the error for code that calls the pipeline for some micro-batches only."""
    return RuntimeError(
        "training_step must call the pipeline once for each micro-batch, or return None without a "
        f"call for all: got {calls}. schedule='fill_drain' gives it the whole batch."
    )
