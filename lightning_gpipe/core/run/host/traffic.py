"""Moves what the stages of a worker have in the memory of the host, when its row needs it."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_gpipe.core.run.stage_pass import StagePass
from lightning_gpipe.core.schedules import Action, Row, activation_moves, weight_moves


class HostTraffic:
    """Moves what the stages of one worker have in the memory of the host, as its row says.

    Args:
        row: The row, of all phases that will run.
        passes: The passes through the worker's stages.
    """

    def __init__(self, row: Row, passes: Mapping[int, StagePass]) -> None:
        hosts = {j: each.host for j, each in passes.items() if each.host is not None}
        self._weights = {j: x.weights for j, x in hosts.items() if x.weights is not None}
        self._activations = {
            j: x.activations for j, x in hosts.items() if x.activations is not None
        }
        self._passes = passes
        self._weight_moves = weight_moves(row if self._weights else ())
        waiting = tuple((j, passes[j].stage.offloads) for j in self._activations)
        self._leaving, self._coming = activation_moves(row if waiting else (), waiting)

    def before(self, action: Action) -> None:
        """Begin to move what the action and those after it need, and wait for the former."""
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
        """Let go of what is not needed soon."""
        if action in self._leaving:
            self._passes[action.j].leave(action.i)
        if moves := self._weight_moves.get(action):
            for j in moves.drops:
                self._weights[j].drop()
