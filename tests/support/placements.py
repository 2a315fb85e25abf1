"""Placements of stages."""


def one_each(n: int) -> tuple[int, ...]:
    """A worker for each of ``n`` stages."""
    return tuple(range(n))
