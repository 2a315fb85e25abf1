"""Zero bubble on two stages for each device: down the devices and back, as the letter V."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from lightning_gpipe.core.schedules.action import Action, Kind, Row, predecessors


def zero_bubble_v_rows(
    m: int, placement: Sequence[int], recomputed: Sequence[int]
) -> tuple[Row, ...]:
    """Alternate between both stages of a worker, with the weights right after each backward.

    Stage j of 2d is on worker j, and on worker 2d - 1 - j on the way back. So the last stage is
    where the first is: a loss is there early, and so is the first backward. A worker holds the
    activations of at most 2d micro-batches of its two stages, which are half as large as with one
    stage each: as much as ``"zero_bubble"``. If F, B and W take equally long, its bubble is about
    half of that one's. With four micro-batches, up to the last loss::

        stage 0 (worker 0) | F0 F1 F2 .  .  .  .  .  .  F3 B0 W0 .  .  .  B1 W1 .
        stage 1 (worker 1) | .  F0 .  F1 .  .  .  F2 B0 W0 .  .  .  F3 B1 W1 .  .
        stage 2 (worker 1) | .  .  F0 .  F1 B0 W0 .  .  .  F2 B1 W1 .  .  .  F3 B2
        stage 3 (worker 0) | .  .  .  F0 B0 W0 F1 B1 W1 .  .  .  F2 B2 W2 .  .  F3

    If every action ran as soon as it could, the schedule would be as short where all take equally
    long. But then values come just when they are needed, and where they come a little later, their
    receivers wait for them in each round: with backwards that take a fifth longer, 5 to 10 % more
    time for twice as many micro-batches as workers or more. Here a worker has other actions to run
    meanwhile.

    Once a worker has begun all forwards, others may wait for its backwards: these run as soon as
    they can, and the weights fill the waits.

    Source: Qi et al., "Zero Bubble Pipeline Parallelism" (2024), where it is ZB-V.
    """
    return _Clock(m, 1 + max(placement), recomputed).rows()


def _passes(m: int, workers: int, w: int) -> Iterator[Action]:
    """Yield the forwards and backwards of worker ``w``, in order.

    Until its first backward the worker runs the forwards that fit into the memory, 2d of both
    stages; from then on as many backwards as forwards.
    """
    down, back = w, 2 * workers - 1 - w
    fill = [(Kind.FORWARD, down)] * (2 * (workers - w) - 1)
    turn = [(Kind.FORWARD, back), (Kind.FORWARD, down)] * w
    first = [(Kind.FORWARD, back), (Kind.BACKWARD, back)] * (workers - w)
    both = [(kind, j) for j in (down, back) for kind in (Kind.FORWARD, Kind.BACKWARD)]
    begun = dict.fromkeys(both, 0)
    for key in [*fill, *turn, *first, *both * m]:
        if begun[key] < m:
            kind, j = key
            yield Action(kind, begun[key], j)
            begun[key] += 1


class _Clock:
    """Runs the forwards and backwards of all workers in order, and places the weights."""

    def __init__(self, m: int, workers: int, recomputed: Sequence[int]) -> None:
        self._last = 2 * workers - 1  # the last stage
        self._recomputed = recomputed
        self._passes = [deque(_passes(m, workers, w)) for w in range(workers)]
        self._forwards = [2 * m] * workers  # that each worker has not begun
        self._weights: list[deque[Action]] = [deque() for _ in range(workers)]
        self._rows: list[list[Action]] = [[] for _ in range(workers)]
        self._end: dict[Action, int] = {}

    def rows(self) -> tuple[Row, ...]:
        free = [0] * len(self._rows)  # the time at which each worker is free
        t = 0
        while any(self._passes) or any(self._weights):
            for w, row in enumerate(self._rows):
                if free[w] > t or (action := self._next(w, t)) is None:
                    continue
                if action.kind is Kind.BACKWARD and action.i < self._recomputed[action.j]:
                    row.append(Action(Kind.RECOMPUTE, action.i, action.j))
                    free[w] = t + 1
                row.append(action)
                free[w] = self._end[action] = max(free[w], t) + 1
            t += 1
        return tuple(map(tuple, self._rows))

    def _next(self, w: int, t: int) -> Action | None:
        passes, weights = self._passes[w], self._weights[w]
        ready = bool(passes) and self._is_ready(passes[0], t)
        if weights and (self._forwards[w] or not ready):
            return weights.popleft()
        if not ready:
            return None
        action = passes.popleft()
        if action.kind is Kind.FORWARD:
            self._forwards[w] -= 1
        else:
            weights.append(action._replace(kind=Kind.WEIGHTS))
        return action

    def _is_ready(self, action: Action, t: int) -> bool:
        needed = (a for a in predecessors(action) if a.kind in _PASSES and 0 <= a.j <= self._last)
        return all(self._end.get(a, t + 1) <= t for a in needed)


_PASSES = (Kind.FORWARD, Kind.BACKWARD)
