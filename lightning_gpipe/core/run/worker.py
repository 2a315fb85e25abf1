"""Runs one worker's row of the schedule over its stages through a transport.

This is the loop with the effects. It makes no decision of its own: the row says what to do next,
what an action needs follows from the action, and where its result is needed follows from stages
being in a line.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lightning_gpipe.core.data import FlatTree
from lightning_gpipe.core.faithful import NOTHING, Context, Manager, together
from lightning_gpipe.core.plan import Action, Kind, successor
from lightning_gpipe.core.run.stage_pass import StagePass
from lightning_gpipe.core.run.timeline import CudaClock, HostClock, Timeline
from lightning_gpipe.core.skip import Route, carrying
from lightning_gpipe.core.transport import Cancelled, Exchange

_VERBS = {Kind.FORWARD: "forward", Kind.RECOMPUTE: "recompute", Kind.BACKWARD: "backward"}


class Worker:
    """One device's worker for one mini-batch.

    Args:
        index: Its place among the workers.
        device: Its device.
        passes: The mini-batch's pass through each stage of the pipeline.
        timeline: Where to write what ran when.
    """

    def __init__(
        self,
        index: int,
        device: torch.device,
        passes: Sequence[StagePass],
        timeline: Timeline,
    ) -> None:
        self._index = index
        self._device = device
        self._passes = passes
        self._timeline = timeline
        on_cuda = device.type == "cuda"
        self._stream = torch.cuda.current_stream(device) if on_cuda else None
        self._clock = CudaClock(self._stream) if self._stream is not None else HostClock()

    def run(self, row: Sequence[Action], exchange: Exchange, context: Context) -> None:
        """Run ``row`` in the caller's context, on the stream that the caller was using."""
        with self.streaming(), context.entered(), self.prepared(row):
            for action in row:
                self.perform(action, exchange)

    def run_inline(self, row: Sequence[Action], exchange: Exchange, context: Context) -> None:
        """Run ``row`` on the caller's thread, once the context is entered and all is prepared."""
        if self._stream is not None:
            # On a device of its own the context may lack what it does not lack on the caller's.
            self.run(row, exchange, context)
            return
        for action in row:
            self.perform(action, exchange)

    def prepared(self, row: Sequence[Action]) -> Manager:
        """Prepare the worker's stages for ``row``: for forwards their shadows are put in place.

        It is the thread that runs the layers that does so: an interrupt strikes the caller's.
        """
        found: list[Manager] = [carrying({})]
        if row[0].kind is Kind.FORWARD:  # and so are all of a half
            workers = len(self._timeline.schedule.rows)
            own = self._passes[self._index :: workers]
            found += [p.shadows.swapped_in(p.stage.journal) for p in own if not p.shadows.in_place]
        return together(found)

    def perform(self, action: Action, exchange: Exchange) -> None:
        """Run one action: take what it needs, and hand over what it made."""
        exchange.check()
        kind = action.kind
        try:
            if kind is Kind.FORWARD:
                self._forward(action, exchange)
            elif kind is Kind.BACKWARD:
                self._backward(action, exchange)
            else:
                self._recompute(action)
        except Cancelled:
            raise
        except BaseException as error:
            error.add_note(f"raised in {self._describe(action)}")
            raise

    def rejoin(self) -> None:
        """Let what the caller does next on the device come after what was done here."""
        if self._stream is None:
            return
        for stream in (
            # Of the caller; in backward it may be another one than in forward.
            torch.cuda.current_stream(self._device),
            # Which of the two the engine takes a CPU node's gradients to be ready on depends on
            # the version of PyTorch.
            torch.cuda.default_stream(self._device),
        ):
            if stream != self._stream:
                stream.wait_stream(self._stream)

    def streaming(self) -> Manager:
        """A context manager that makes the worker's stream the current one of its device."""
        return NOTHING if self._stream is None else torch.cuda.stream(self._stream)

    def _forward(self, action: Action, exchange: Exchange) -> None:
        stage_pass = self._passes[action.j]
        arriving, leaving = stage_pass.stage.arriving, stage_pass.stage.leaving
        inputs = exchange.receive(action)
        if arriving:
            inputs = _joined(inputs, _receive_skips(exchange, action, arriving))
        start = self._clock.now()
        outputs = stage_pass.forward(action.i, inputs)
        self._timeline.add(self._index, action, start, self._clock.now())
        if leaving:
            outputs = _send_skips(exchange, action, outputs, leaving)
        exchange.send(successor(action), outputs)

    def _recompute(self, action: Action) -> None:
        start = self._clock.now()
        self._passes[action.j].recompute(action.i)
        self._timeline.add(self._index, action, start, self._clock.now())

    def _backward(self, action: Action, exchange: Exchange) -> None:
        stage_pass = self._passes[action.j]
        arriving, leaving = stage_pass.stage.leaving, stage_pass.stage.arriving
        given = exchange.receive(action)
        if arriving:
            given = _joined(given, _receive_skips(exchange, action, arriving))
        start = self._clock.now()
        gradients = FlatTree(stage_pass.backward(action.i, given.leaves))
        self._timeline.add(self._index, action, start, self._clock.now())
        if leaving:
            gradients = _send_skips(exchange, action, gradients, leaving)
        exchange.send(successor(action), gradients)

    def _describe(self, action: Action) -> str:
        microbatch = f"micro-batch {action.i} of {self._timeline.schedule.m}"
        return f"{_VERBS[action.kind]} of {microbatch} on {self._passes[action.j].stage}"


def _receive_skips(exchange: Exchange, at: Action, skips: Sequence[Route]) -> list[Any]:
    """The skip tensors that ``at`` needs, or their gradients."""
    return [exchange.receive(at, route).leaves[0] for route in skips]


def _joined(value: FlatTree, tensors: list[Any]) -> FlatTree:
    """What a stage beside sent, followed by skip tensors."""
    return FlatTree([*value.leaves, *tensors], value.spec)


def _send_skips(
    exchange: Exchange, by: Action, value: FlatTree, skips: Sequence[Route]
) -> FlatTree:
    """Send the skip tensors at the end of what ``by`` made where they go, and return the rest."""
    main = max(0, len(value.leaves) - len(skips))  # without gradients there is nothing
    tensors = value.leaves[main:] if value.leaves else [None] * len(skips)
    for route, tensor in zip(skips, tensors, strict=True):
        j = route.target if by.kind is Kind.FORWARD else route.source
        exchange.send(by._replace(j=j), FlatTree([tensor]), route)
    return FlatTree(value.leaves[:main], value.spec)
