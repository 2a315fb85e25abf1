"""A plan as a picture: what runs when, and below it the memory of each device over time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_gpipe.core.plan import Prediction
from lightning_gpipe.core.run import Span
from lightning_gpipe.core.show.picture import check_can_draw, draw_timeline
from lightning_gpipe.core.show.plans import headline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LISTED = 16  # with more lines, a legend hides the picture


def plan_picture(prediction: Prediction) -> Figure:
    """Draw what is predicted to run when, and what each device holds at the time.

    Returns:
        A figure as wide as a slide; ``figure.savefig("plan.png")`` writes it.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    check_can_draw()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.8, 7.2), dpi=150, layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    workers = [f"device {stage.device}" for stage in prediction.stages]
    scale = 1.0 if prediction.unit == "s" else 1e-12  # as many "milliseconds" as GFLOP
    spans = [
        Span(worker, action, scale * start, scale * end)
        for worker, action, start, end in prediction.spans
    ]
    draw_timeline(above, spans, workers)
    above.set_title(headline(prediction), loc="left", fontsize=12, pad=26)
    _draw_memory(below, prediction, workers, scale)
    below.set_xlabel("milliseconds" if prediction.unit == "s" else "GFLOP")
    return figure


def _draw_memory(axes: Axes, prediction: Prediction, workers: list[str], scale: float) -> None:
    """A line of steps for each device, and its limit if it is known."""
    end = prediction.time
    for j, over_time in enumerate(prediction.memory_over_time()):
        times = [1e3 * scale * at for at, _ in [*over_time, (end, 0)]]
        sizes = [held / 2**30 for _, held in over_time]
        label = workers[j] if len(workers) <= _LISTED else None
        axes.step(times, [*sizes, sizes[-1]], where="post", label=label, linewidth=1.4)
    for limit in {stage.limit for stage in prediction.stages if stage.limit < float("inf")}:
        axes.axhline(limit / 2**30, color="#b03030", linestyle="--", linewidth=1)
        axes.annotate("memory", (0, limit / 2**30), color="#b03030", va="bottom", fontsize=9)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("GiB")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if len(workers) <= _LISTED:
        axes.legend(loc="upper right", fontsize=8, frameon=False, ncols=2)
