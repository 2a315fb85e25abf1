"""Runs one worker's row of the schedule over its stages through a transport.

This is the loop with the effects. It makes no decision of its own: the row says what to do next,
what an action needs follows from the action, and where its result is needed follows from stages
being in a line.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from lightning_gpipe.core.context import Context
from lightning_gpipe.core.pytree import Flat
from lightning_gpipe.core.schedule import Action, Kind
from lightning_gpipe.core.skip.layout import Route
from lightning_gpipe.core.stage_pass import StagePass
from lightning_gpipe.core.timeline import CudaClock, HostClock, Stamp, Timeline
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

    def run(self, row: Iterable[Action], exchange: Exchange, context: Context) -> None:
        """Run ``row`` in the caller's context, on the stream that the caller was using."""
        with self.streaming(), context.entered():
            for action in row:
                self.perform(action, exchange)

    def perform(self, action: Action, exchange: Exchange) -> None:
        """Run one action: take what it needs, and hand over what it made."""
        exchange.check()
        try:
            match action.kind:
                case Kind.FORWARD:
                    self._forward(action, exchange)
                case Kind.RECOMPUTE:
                    start = self._clock.now()
                    self._passes[action.j].recompute(action.i)
                    self._note(action, start)
                case Kind.BACKWARD:
                    self._backward(action, exchange)
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

    def streaming(self) -> AbstractContextManager[Any]:
        """A context manager that makes the worker's stream the current one of its device."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _forward(self, action: Action, exchange: Exchange) -> None:
        _, i, j = action
        stage_pass = self._passes[j]
        inputs = self._receive(exchange, action, stage_pass.stage.arriving)
        start = self._clock.now()
        outputs = stage_pass.forward(i, inputs)
        self._note(action, start)
        self._send(exchange, Action(Kind.FORWARD, i, j + 1), outputs, stage_pass.stage.leaving)

    def _backward(self, action: Action, exchange: Exchange) -> None:
        _, i, j = action
        stage_pass = self._passes[j]
        given = self._receive(exchange, action, stage_pass.stage.leaving)
        start = self._clock.now()
        gradients = Flat(stage_pass.backward(i, given.leaves))
        self._note(action, start)
        self._send(exchange, Action(Kind.BACKWARD, i, j - 1), gradients, stage_pass.stage.arriving)

    def _receive(self, exchange: Exchange, at: Action, skips: Sequence[Route]) -> Flat:
        """What ``at`` needs of the stage beside it, followed by the skip tensors it needs."""
        value = exchange.receive(at)
        if not skips:
            return value
        tensors = [exchange.receive(at, route).leaves[0] for route in skips]
        return Flat([*value.leaves, *tensors], value.spec)

    def _send(self, exchange: Exchange, to: Action, value: Flat, skips: Sequence[Route]) -> None:
        """Send the skip tensors at the end of ``value`` where they go, and the rest to ``to``."""
        if not skips:
            exchange.send(to, value)
            return
        main = max(0, len(value.leaves) - len(skips))  # without gradients there is nothing
        tensors = value.leaves[main:] if value.leaves else [None] * len(skips)
        for route, tensor in zip(skips, tensors, strict=True):
            j = route.target if to.kind is Kind.FORWARD else route.source
            exchange.send(to._replace(j=j), Flat([tensor]), route)
        exchange.send(to, Flat(value.leaves[:main], value.spec))

    def _note(self, action: Action, start: Stamp) -> None:
        self._timeline.add(self._index, action, start, self._clock.now())

    def _describe(self, action: Action) -> str:
        microbatch = f"micro-batch {action.i} of {self._timeline.schedule.m}"
        return f"{_VERBS[action.kind]} of {microbatch} on {self._passes[action.j].stage}"
