"""Zero bubble on two stages for each device: down the devices and back, as the letter V."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lightning_gpipe.core.schedules.action import Action, Kind, Row, predecessors


def zero_bubble_v_rows(
    m: int, placement: Sequence[int], recomputed: Sequence[int]
) -> tuple[Row, ...]:
    """Run what is ready: a backward, else a forward that there is room for, else the weights.

    Stage j of 2d is on worker j, and on worker 2d - 1 - j on the way back. So the last stage is
    where the first is: a loss is there early, and so is the first backward. A worker holds the
    activations of at most 2d micro-batches of its two stages, which are half as large as with one
    stage each: as much as ``"zero_bubble"``. If F, B and W take equally long, its bubble is about
    half of that one's. With four micro-batches, up to the last loss::

        stage 0 (worker 0) | F0 F1 F2 .  .  .  .  B0 .  .  F3 B1 W0 .  .  .  W1 B2 W2 .  .  .
        stage 1 (worker 1) | .  F0 .  F1 .  .  B0 .  F2 .  B1 .  .  W0 F3 .  B2 .  .  W1 W2 .
        stage 2 (worker 1) | .  .  F0 .  F1 B0 .  W0 .  B1 .  W1 F2 .  .  B2 .  W2 F3 .  .  B3
        stage 3 (worker 0) | .  .  .  F0 B0 W0 F1 .  B1 W1 .  .  .  F2 B2 W2 .  .  .  F3 B3 W3

    Source: Qi et al., "Pipeline Parallelism with Controllable Memory" (2024), where the schedule
    with as much memory as 1F1B is called V-ZB; in "Zero Bubble Pipeline Parallelism" ZB-V.
    """
    return _Greedy(m, 1 + max(placement), recomputed).rows()


class _Greedy:
    """Chooses the actions of all workers, clock cycle by clock cycle."""

    def __init__(self, m: int, workers: int, recomputed: Sequence[int]) -> None:
        self._m = m
        self._n = 2 * workers
        self._recomputed = recomputed
        self._rows: list[list[Action]] = [[] for _ in range(workers)]
        self._end: dict[Action, int] = {}
        # The number of micro-batches that each stage has begun, by the kind of action.
        self._begun = {kind: [0] * self._n for kind in _KINDS}

    def rows(self) -> tuple[Row, ...]:
        free = [0] * len(self._rows)  # the time at which each worker is free
        t = 0
        while len(self._end) < len(_KINDS) * self._m * self._n:
            for w, row in enumerate(self._rows):
                if free[w] > t or (action := self._next(w, t)) is None:
                    continue
                if action.kind is Kind.BACKWARD and action.i < self._recomputed[action.j]:
                    row.append(Action(Kind.RECOMPUTE, action.i, action.j))
                    free[w] = t + 1
                row.append(action)
                free[w] = self._end[action] = max(free[w], t) + 1
                self._begun[action.kind][action.j] += 1
            t += 1
        return tuple(map(tuple, self._rows))

    def _next(self, w: int, t: int) -> Action | None:
        """The action that worker ``w`` begins at time ``t``."""
        down, back = w, self._n - 1 - w
        backwards = self._ready(Kind.BACKWARD, (down, back), t)
        if oldest := min(backwards, key=lambda action: action.i, default=None):
            return oldest
        weights = self._ready(Kind.WEIGHTS, (back, down), t)
        forwards = self._ready(Kind.FORWARD, (back, down), t) if self._room(w) else iter(())
        return next(forwards, None) or next(weights, None)

    def _ready(self, kind: Kind, stages: tuple[int, int], t: int) -> Iterator[Action]:
        """Yield the next action of a kind on each of these stages, if what it needs has ended."""
        for j in stages:
            action = Action(kind, self._begun[kind][j], j)
            needed = (a for a in predecessors(action) if a.kind in _KINDS and 0 <= a.j < self._n)
            if action.i < self._m and all(self._end.get(a, t + 1) <= t for a in needed):
                yield action

    def _room(self, w: int) -> bool:
        """Return True if worker ``w`` may hold the activations of another micro-batch."""
        begun, ended = self._begun[Kind.FORWARD], self._begun[Kind.WEIGHTS]
        return sum(begun[j] - ended[j] for j in (w, self._n - 1 - w)) < self._n


_KINDS = (Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHTS)
