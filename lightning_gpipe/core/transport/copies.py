"""Copies between devices that do not wait for computation, nor make it wait.

A copy that is queued on the stream that computes delays what is computed next. Each CUDA device
therefore has two side streams, one for copies that leave it and one for copies that arrive, so that
the micro-batch that leaves does not hold up the one that arrives either.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_gpipe.core.data import carry, identity


class _SideStreams(NamedTuple):
    leaving: torch.cuda.Stream
    arriving: torch.cuda.Stream


class Copies:
    """Carries tensors from device to device; used from several threads."""

    def __init__(self, devices: list[torch.device]) -> None:
        self._devices = frozenset(devices)
        self._side = {
            device: _SideStreams(torch.cuda.Stream(device), torch.cuda.Stream(device))
            for device in dict.fromkeys(devices)
            if device.type == "cuda"
        }

    @property
    def one_device(self) -> bool:
        """Whether all is on one device, so that what a stage makes is where it is needed."""
        return len(self._devices) == 1

    def send(
        self, leaves: list[Any], source: torch.device | None, target: torch.device
    ) -> tuple[list[Any], torch.cuda.Event | None]:
        """Queue copies to ``target`` of the tensors among ``leaves`` that are on ``source``.

        Call it with the stream that computed them current. What a layer put on another device, such
        as lengths that are wanted on the CPU, stays there; None as the source moves everything.

        Returns:
            The leaves (the same list if nothing had to move), and an event after which those on
            ``target`` may be read, or None if they may be at once.
        """

        def moves(leaf: Any) -> bool:
            return (
                isinstance(leaf, Tensor) and leaf.device != target and source in (None, leaf.device)
            )

        if source == target or not any(map(moves, leaves)):
            return leaves, None
        # One tensor in two places stays one: a layer may edit it in place.
        copies = {identity(leaf): self._copy(leaf, target) for leaf in leaves if moves(leaf)}
        moved = [copies[identity(leaf)] if moves(leaf) else leaf for leaf in leaves]
        if target not in self._side:
            return moved, None
        return moved, self._side[target].arriving.record_event()

    def accept(self, leaves: list[Any], ready: torch.cuda.Event, target: torch.device) -> None:
        """Let the current stream of ``target`` read ``leaves`` once they have arrived."""
        stream = torch.cuda.current_stream(target)
        stream.wait_event(ready)
        for leaf in leaves:
            if isinstance(leaf, Tensor) and leaf.device == target:
                leaf.record_stream(stream)

    def _copy(self, tensor: Tensor, target: torch.device) -> Tensor:
        source = tensor.device
        with ExitStack() as streams:
            if source in self._side:
                leaving = self._side[source].leaving
                leaving.wait_stream(torch.cuda.current_stream(source))
                tensor.record_stream(leaving)
                streams.enter_context(torch.cuda.stream(leaving))
            if target in self._side:
                streams.enter_context(torch.cuda.stream(self._side[target].arriving))
            # A copy to the host is waited for, as nobody there could wait for an event later; one
            # from the host too, as its memory is the user's to write to again.
            on_cuda = source.type == target.type == "cuda"
            moved = tensor.detach().to(target, non_blocking=on_cuda)
        return carry(tensor, moved.requires_grad_(tensor.requires_grad))
