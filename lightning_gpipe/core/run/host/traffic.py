"""Moves weights and activations of a worker to its device and back, by its row."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from zlib import crc32

from lightning_gpipe.core.run.stage_pass import StagePass
from lightning_gpipe.core.schedules import (
    Action,
    Row,
    activation_moves,
    weight_moves,
    weight_moves_at_once,
)


class HostTraffic:
    """Moves tensors of one worker's stages from the host or other replicas and back, by its row."""

    def __init__(self, w: int, row: Row, phase: Row, passes: Mapping[int, StagePass]) -> None:
        hosts = {j: each.host for j, each in passes.items() if each.host is not None}
        self._weights = {j: x.weights for j, x in hosts.items() if x.weights is not None}
        self._activations = {
            j: x.activations for j, x in hosts.items() if x.activations is not None
        }
        self._passes = passes
        self._weight_moves = weight_moves(row if self._weights else ())
        waiting = tuple((j, passes[j].stage.offloads) for j in self._activations)
        self._leaving, self._coming = activation_moves(row if waiting else (), waiting)
        divided = next((x.stage.divided for x in passes.values()), None)
        if divided is not None:  # see Note [The same gathers in all replicas]
            loaded = tuple(j for j, weights in self._weights.items() if weights.loaded)
            if not divided.agree(w, _checksum(row, phase, loaded)):
                self._weight_moves = weight_moves_at_once(phase)

    def before(self, action: Action) -> None:
        """Begin to move tensors for the action and those after it, and wait for the former."""
        if moves := self._weight_moves.get(action):
            for j in moves.loads:
                self._weights[j].load()
        if visit := self._coming.get(action):
            i, j = visit
            self._activations[j].fetch(i)
        if weights := self._weights.get(action.j):
            weights.await_values()
        if activations := self._activations.get(action.j):
            activations.await_values(action.i)

    def after(self, action: Action) -> None:
        """Let tensors leave the device that are not needed soon."""
        if action in self._leaving:
            self._passes[action.j].leave(action.i)
        if moves := self._weight_moves.get(action):
            for j in moves.drops:
                self._weights[j].drop()


@lru_cache(maxsize=256)
def _checksum(row: Row, phase: Row, loaded: tuple[int, ...]) -> int:
    """Return a number that almost surely differs for other rows."""
    return crc32(repr((row, phase, loaded)).encode())
