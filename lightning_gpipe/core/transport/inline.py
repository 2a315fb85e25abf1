"""All workers on the calling thread, in the order of the schedule.

For a debugger, for a single device, for a caller with a dispatch mode, which no other thread can
enter, and for a caller on a thread of autograd, which must not be blocked.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from types import FrameType

import torch
from torch.autograd.graph import _engine_run_backward
from typing_extensions import override

from lightning_gpipe.core.data import FlatTree
from lightning_gpipe.core.faithful import NOTHING, intra_op_threads, together
from lightning_gpipe.core.layout import HOST, Layout
from lightning_gpipe.core.programs import Route
from lightning_gpipe.core.schedules import Action, Schedule
from lightning_gpipe.core.transport.copies import Copies, Parcel
from lightning_gpipe.core.transport.exclusion import Exclusion
from lightning_gpipe.core.transport.interface import Exchange, Label, Task, Transport
from lightning_gpipe.core.transport.threads import (
    frames_of_threads,
    lineage,
    perform_with,
    share_of,
)

NESTED = (
    "a layer must not run the pipeline that it is part of: it would wait for itself. Call the "
    "layers that are needed one by one instead."
)


class InlineExchange(Exchange):
    """A dict of the values sent: no worker ever waits."""

    def __init__(self, phase: Schedule, copies: Copies) -> None:
        self.phase = phase
        self._copies = copies
        self._parcels: dict[tuple[Action, Route | None], Parcel] = {}

    @override
    def send(self, to: Action, value: FlatTree, skip: Route | None = None) -> None:
        self._parcels[to, skip] = self._copies.pack(to, value, skip)

    @override
    def receive(self, at: Action, skip: Route | None = None) -> FlatTree:
        parcel = self._parcels.pop((at, skip), None)
        if parcel is None:
            raise RuntimeError(f"a run must send what {at} needs: it ended without doing so.")
        value, ready = parcel
        return value if ready is None else self._copies.unpack(at, value, ready)


class InlineTransport(Transport):
    """Runs all workers in turns on the calling thread.

    Operators use as many threads as if ``shares`` workers shared the cores: results are bit-equal.
    """

    def __init__(
        self,
        layout: Layout,
        exclusion: Exclusion | None = None,
        *,
        shares: int = 1,
        cores: int | None = None,
    ) -> None:
        self._layout = layout
        self._shares = shares if cores is None else len(layout.devices)
        self._cores = cores
        # On other devices a stage need not wait for all micro-batches of the next one.
        own_devices = {*layout.devices} != {HOST}
        self._at_once = not (own_devices or layout.spread or cores is not None)
        self._exclusion = exclusion or Exclusion(layout)
        self._copies: Copies | None = None
        self._may_run = False  # True during a run, and perhaps after a failed one

    @override
    def exclusive(self) -> AbstractContextManager[None]:
        self.refuse_nested()
        return self._exclusion.entered()

    def refuse_nested(self) -> None:
        """Raise if the calling thread, or one that waits for it, is in a run of this transport.

        Their stacks are searched for it, because a flag could survive an interrupt.
        """
        if not self._may_run:
            return
        _, *callers = lineage()
        nested = self._runs_in(sys._getframe(1))
        if callers and not nested:
            with frames_of_threads() as frame_of:
                nested = any(self._runs_in(frame_of.get(each.ident or 0)) for each in callers)
        if nested:
            raise RuntimeError(NESTED)

    def _runs_in(self, frame: FrameType | None) -> bool:
        # Stop at a call of autograd's engine. While the engine waits for the thread of a GPU, in a
        # backward action, it runs other nodes of the caller's backward on this thread, such as that
        # of a second mini-batch: no layer of the first is running then.
        while frame is not None and frame.f_code is not _engine_run_backward.__code__:
            if frame.f_code is InlineTransport.run.__code__ and frame.f_locals["self"] is self:
                return True
            frame = frame.f_back
        return False

    @override
    def open(
        self, phase: Schedule, label: Label | None = None, awaited: Collection[Action] | None = None
    ) -> Exchange:
        return InlineExchange(phase, self.copies())

    def sharing(self) -> AbstractContextManager[None]:
        if self._cores is not None:
            return intra_op_threads(share_of(self._cores, self._shares))
        if self._shares <= 1:
            return NOTHING
        own = torch.get_num_threads()
        share = share_of(own, self._shares)
        return NOTHING if share == own else intra_op_threads(share)

    def copies(self) -> Copies:
        if self._copies is None:
            self._copies = Copies(self._layout)
        return self._copies

    @override
    def run(self, exchange: Exchange, tasks: Sequence[Task], caller: Task | None = None) -> None:
        task_of = dict(zip(self._layout.workers_here, tasks, strict=True))
        if caller is not None:
            task_of[len(self._layout.devices)] = caller
        sessions = [task.session(joined=k > 0) for k, task in enumerate(tasks)]
        self._may_run = True
        phase = exchange.phase
        by_stage = phase.turns_by_stage if self._at_once else ()
        with together([self.sharing(), *sessions]):
            for worker, row in by_stage or phase.turns_of(tuple(self._layout.workers_here)):
                if by_stage:
                    task_of[worker].perform(row, at_once=True)
                elif self._cores is None:
                    task_of[worker].perform(row)
                else:
                    perform_with(self._cores, phase, task_of[worker], row)
        self._may_run = False

    @override
    def inline(self) -> InlineTransport:
        return self

    @override
    def close(self) -> None:
        """Do nothing: nothing was started."""
