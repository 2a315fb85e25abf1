"""Draws a plan: the timeline, and below it the memory of each device over time."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

import numpy as np

from lightning_gpipe.core.planner import Prediction
from lightning_gpipe.core.schedules import Span
from lightning_gpipe.core.show.picture import check_can_draw, draw_timeline
from lightning_gpipe.core.show.plans import headline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_RED, _BLUE = "#b03030", "#3b75af"
_TIMES = 1600  # about one per pixel
_LINES = 8  # with more devices, the range is drawn: the lines could not be told apart


def plan_picture(prediction: Prediction) -> Figure:
    """Draw the predicted timeline, and the memory of each device over time.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    check_can_draw()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.8, 7.2), dpi=150, layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    workers = [f"device {device}" for device in prediction.workers]
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
    """Draw a step line for each device, or the range of all, and the known limits."""
    # The last of simultaneous changes counts: a recomputation begins when a backward ends.
    over_time = [dict(changes) for changes in prediction.memory_over_time()]
    if len(workers) <= _LINES:
        for label, sizes in zip(workers, over_time, strict=True):
            times = [1e3 * scale * at for at in (*sizes, prediction.time)]
            values = [size / 2**30 for size in sizes.values()]
            axes.step(times, [*values, values[-1]], where="post", label=label, linewidth=1.4)
    else:
        _draw_range(axes, prediction, over_time, scale)
    for limit in sorted({stage.limit / 2**30 for stage in prediction.stages} - {inf}):
        axes.axhline(limit, color=_RED, linestyle="--", linewidth=1)
        axes.annotate(
            f"limit: {limit:.4g} GiB",
            (0.995, limit),
            xycoords=("axes fraction", "data"),
            ha="right",
            va="bottom",
            color=_RED,
            fontsize=9,
        )
    axes.set_ylim(0, 1.1 * axes.get_ylim()[1])  # room for the text above the limit
    axes.set_ylabel("GiB")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    legend = {"ncols": _LINES, "frameon": False, "borderaxespad": 0.2, "fontsize": 8}
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), **legend)


def _draw_range(
    axes: Axes, prediction: Prediction, over_time: list[dict[float, float]], scale: float
) -> None:
    """Draw the memory of the fullest device at each time, and of the one with the most room."""
    times = np.linspace(0, prediction.time, _TIMES)
    memory = np.empty((len(over_time), _TIMES))
    for row, sizes in zip(memory, over_time, strict=True):
        latest = np.searchsorted(list(sizes), times, side="right") - 1
        row[:] = np.array(list(sizes.values()))[latest] / 2**30
    milliseconds = 1e3 * scale * times
    most, least = memory.max(axis=0), memory.min(axis=0)
    axes.fill_between(milliseconds, least, most, color=_BLUE, alpha=0.25, label="all devices")
    axes.plot(milliseconds, most, color=_BLUE, linewidth=1.4, label="the fullest device")
