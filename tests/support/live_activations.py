"""The activations that the workers of a schedule hold."""

from lightning_gpipe.core.schedules import Kind, Schedule


def peak_live(schedule: Schedule) -> tuple[int, ...]:
    """For each worker, the most micro-batches whose activations are alive at once.

    They are alive from the forward, or the recomputation if there is one, to the backward or, where
    that is split, its second part.
    """
    peaks = []
    for row in schedule.rows:
        makes = {a[1:]: a for a in row if a.kind in (Kind.FORWARD, Kind.RECOMPUTE)}
        frees = {a[1:]: a for a in row if a.kind in (Kind.BACKWARD, Kind.WEIGHTS)}
        live = peak = 0
        for action in row:
            live += makes.get(action[1:]) is action
            peak = max(peak, live)
            live -= frees.get(action[1:]) is action
        peaks.append(peak)
    return tuple(peaks)
