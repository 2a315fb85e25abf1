"""What the engine does not run yet, written as data."""


def v_shaped(workers: int) -> tuple[int, ...]:
    """Two stages per worker: down the workers and up again, 0, 1, 1, 0."""
    return (*range(workers), *reversed(range(workers)))
