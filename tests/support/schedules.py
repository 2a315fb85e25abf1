"""Schedules that the engine does not run yet, written as data."""

from collections.abc import Iterator

from lightning_gpipe.core.plan import Action, Kind, Loss, Schedule


def one_forward_one_backward(m: int, n: int) -> Schedule:
    """Each stage runs as many forwards as it must, then a backward for each forward.

    Source: Narayanan et al., "PipeDream" (2019), with the flush of Megatron-LM; each micro-batch
    has a loss of its own.
    """

    def row(j: int) -> Iterator[Action]:
        warm_up = min(m, n - j)
        for i in range(warm_up):
            yield Action(Kind.FORWARD, i, j)
        for i in range(m):
            yield Action(Kind.BACKWARD, i, j)
            if i + warm_up < m:
                yield Action(Kind.FORWARD, i + warm_up, j)

    rows = tuple(tuple(row(j)) for j in range(n))
    return Schedule(m, tuple(range(n)), (rows,), Loss.OF_MICRO_BATCH)


def v_shaped(workers: int) -> tuple[int, ...]:
    """Two stages per worker: down the workers and up again, 0, 1, 1, 0."""
    return (*range(workers), *reversed(range(workers)))
