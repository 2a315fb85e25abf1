"""Copies between devices that overlap with computation.

A copy on the compute stream would delay the computation queued after it. Each CUDA device therefore
has two side streams: one for copies that leave it, one for copies that arrive.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_gpipe.core.data import FlatTree, copy_marks, identity, record_stream
from lightning_gpipe.core.layout import Layout
from lightning_gpipe.core.programs import Route, sender
from lightning_gpipe.core.schedules import CALLER, Action, Kind


class _SideStreams(NamedTuple):
    leaving: torch.cuda.Stream
    arriving: torch.cuda.Stream


# The devices between which the tensors on a route go, None for any source; None if they stay.
_Ends = tuple[torch.device | None, torch.device] | None
# A value on the device of its receiver, and the event after which its tensors may be read; None if
# they may be read at once.
Parcel = tuple[FlatTree, torch.cuda.Event | None]


class Copies:
    """Carries values from the device of one stage to that of another; used from several threads."""

    def __init__(self, layout: Layout) -> None:
        here = set(layout.stages_here)
        stages = range(layout.n)
        self._devices = [layout.device_of(j) if j in here else layout.outside for j in stages]
        self._ends: dict[tuple[Kind, int, Route | None], _Ends] = {}
        self._side = {
            device: _SideStreams(torch.cuda.Stream(device), torch.cuda.Stream(device))
            for device in dict.fromkeys(layout.devices_here)
            if device.type == "cuda"
        }

    def pack(self, to: Action, value: FlatTree, skip: Route | None) -> Parcel:
        """Queue the copies of ``value`` for ``to``, on the thread that computed the value.

        A tensor that a layer put on another device than its stage's, such as lengths on the CPU,
        stays there. All tensors that the caller sends are moved.
        """
        route = to.kind, to.j, skip
        if route not in self._ends:
            self._ends[route] = self._ends_of(to, skip)
        ends = self._ends[route]
        if ends is None:
            return value, None
        leaves, ready = self.send(value.leaves, *ends)
        return FlatTree(leaves, value.spec), ready

    def unpack(self, at: Action, value: FlatTree, ready: torch.cuda.Event) -> FlatTree:
        """Let the current stream of the device of ``at`` read the value once it has arrived."""
        device = self.device_at(at.j)
        stream = torch.cuda.current_stream(device)
        stream.wait_event(ready)
        for leaf in value.leaves:
            if isinstance(leaf, Tensor) and leaf.device == device:
                record_stream(leaf, stream)
        return value

    def device_at(self, j: int) -> torch.device:
        """Return the device of stage ``j``; for the caller, that of the first or last stage."""
        return self._devices[min(max(j, 0), len(self._devices) - 1)]

    def _ends_of(self, to: Action, skip: Route | None) -> _Ends:
        j, target = sender(to, skip), self.device_at(to.j)
        source = None if to.kind.direction > 0 and j == CALLER else self.device_at(j)
        return None if source == target else (source, target)

    def send(
        self, leaves: list[Any], source: torch.device | None, target: torch.device
    ) -> tuple[list[Any], torch.cuda.Event | None]:
        """Queue copies to ``target`` of the tensors on ``source``; of all tensors if that is None.

        Return the leaves, and the event after which they may be read, or None for at once.
        """

        def moves(leaf: Any) -> bool:
            return (
                isinstance(leaf, Tensor) and leaf.device != target and source in (None, leaf.device)
            )

        if not any(map(moves, leaves)):
            return leaves, None
        # A tensor that appears twice stays one tensor: a layer may edit it in place.
        copies = {identity(leaf): self._copy(leaf, target) for leaf in leaves if moves(leaf)}
        moved = [copies[identity(leaf)] if moves(leaf) else leaf for leaf in leaves]
        if target not in self._side:
            return moved, None
        return moved, self._side[target].arriving.record_event()

    def _copy(self, tensor: Tensor, target: torch.device) -> Tensor:
        source = tensor.device
        with ExitStack() as streams:
            if source in self._side:
                leaving = self._side[source].leaving
                leaving.wait_stream(torch.cuda.current_stream(source))
                record_stream(tensor, leaving)
                streams.enter_context(torch.cuda.stream(leaving))
            if target in self._side:
                streams.enter_context(torch.cuda.stream(self._side[target].arriving))
            # A copy to the host blocks, because nothing on the host waits for the event. A copy
            # from the host blocks too, because the user may overwrite that memory afterwards.
            on_cuda = source.type == target.type == "cuda"
            moved = tensor.detach().to(target, non_blocking=on_cuda)
        return copy_marks(tensor, moved.requires_grad_(tensor.requires_grad))
