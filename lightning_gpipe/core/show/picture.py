"""Draws timelines: a row for each worker, a box for each action, gaps where it waits.

Recorded and simulated timelines look alike, for comparison. The caller's row, if it is one of the
schedule, is the last. Drawing needs matplotlib, which is an extra.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import groupby, product
from math import ceil
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from lightning_gpipe.core.schedules import CALLER, Kind, Span

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INSTALL = "pip install matplotlib"

_COLORS = {
    Kind.FORWARD: "#3b75af",
    Kind.RECOMPUTE: "#a6c8e6",
    Kind.BACKWARD: "#e8853d",
    Kind.WEIGHTS: "#f6cfa4",
    Kind.PREPARE: "#8a8a8a",
    Kind.LOSS: "#5b8c5a",
    Kind.CODE: "#b59a3c",
    Kind.GRADIENTS: "#8d6fad",
}
# With white labels.
_DARK = (Kind.FORWARD, Kind.BACKWARD, Kind.PREPARE, Kind.LOSS, Kind.CODE, Kind.GRADIENTS)
_INCHES, _DPI = 12.8, 150  # the width of a slide: 1920 pixels
_ROWS = 32  # with more, lanes are too narrow for text
_NAMES = 24  # of workers, at most; more would overlap in a part of a figure
_LINES = 34  # of names in 10 points that fit into a figure
_SMALLEST = 6  # points, for names with more lines
_POINTS = 5.5  # the width of a digit in a box
_MOST_FIT = 0.9  # the least share of labels of a kind; fewer would look like a selection
_BOXES = 20_000  # with more, they are narrower than a pixel
_PIXELS = 1600  # between the left and the right of the axes


def can_draw() -> bool:
    """Return whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def check_can_draw() -> None:
    """Raise an ImportError if matplotlib is not installed."""
    if not can_draw():
        raise ImportError(f"drawing needs matplotlib: not installed. Run {INSTALL}.")


def check_can_draw_to(path: str) -> None:
    """Raise an error if a picture could not be written to the path."""
    check_can_draw()
    from matplotlib.backend_bases import FigureCanvasBase

    folder, kind = os.path.dirname(path) or ".", os.path.splitext(path)[1].lstrip(".").lower()
    kinds = FigureCanvasBase.get_supported_filetypes()
    if not os.path.isdir(folder) or (kind and kind not in kinds):
        raise ValueError(
            f"a picture must be a file in a folder that is there, of one of the kinds "
            f"{', '.join(sorted(kinds))}: got {path!r}. Write plan.png."
        )


def timeline_picture(
    spans: Sequence[Span], workers: Sequence[str], *, title: str = "", note: str = ""
) -> Figure:
    """Draw a recorded or predicted timeline, as wide as a slide::

        cuda:0   ▇F0▇▇F1▇▇F2▇             ▇B2▇▇R1▇▇B1▇ ...
        cuda:1        ▇F0▇▇F1▇▇F2▇▇B2▇▇R1▇▇B1▇

    Each stage of a worker with several stages has a lane of its own, from top to bottom.

    Args:
        spans: The actions, with times in seconds from any beginning.
        workers: The name of each worker, of one line or several, and of the caller if it acts.
        title: The title above the picture.
        note: Lines below the title, in smaller letters.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    check_can_draw()
    from matplotlib.figure import Figure

    row = max(0.55, 0.19 * _lines(workers))
    height = min(7.2, 1.9 + row * len(workers))
    figure = Figure(figsize=(_INCHES, height), dpi=_DPI, layout="constrained")
    axes = figure.add_subplot()
    draw_timeline(axes, spans, workers)
    pad = 8 if not note else 26 + 14 * note.count("\n")
    axes.set_title(title, loc="left", fontsize=15, fontweight="bold", pad=pad)
    axes.annotate(
        note,
        (0, 1),
        (0, 9),
        xycoords="axes fraction",
        textcoords="offset points",
        va="bottom",
        fontsize=10.5,
        color="#555555",
    )
    axes.set_xlabel("milliseconds")
    return figure


def draw_timeline(axes: Axes, spans: Sequence[Span], workers: Sequence[str]) -> None:
    """Draw a timeline into axes; see :func:`timeline_picture` for the arguments."""
    begin = min((span.start for span in spans), default=0.0)
    length = max((span.end for span in spans), default=0.0) - begin or 1e-3
    figure = axes.get_figure(root=True)
    assert figure is not None
    points = 72 * 0.85 * figure.get_figwidth() / length
    lanes = _lanes(spans)
    kinds = {span.action.kind for span in spans}
    for kind, color in _COLORS.items():
        if kind in kinds:
            axes.broken_barh([], (0, 0), facecolor=color, label=kind.verb)  # for the legend
    # The caller's actions differ in length from those of stages of the same kind.
    for (kind, color), by_caller in product(_COLORS.items(), (False, True)):
        actions = (span for span in spans if span.action.kind is kind)
        chosen = [span for span in actions if span.action.by_caller == by_caller]
        if chosen and len(spans) > _BOXES:
            _draw_pixels(axes, chosen, color, begin, length, len(workers))
        elif chosen:
            _draw_boxes(axes, chosen, lanes, color, begin, points)
    _frame(axes, workers, 1e3 * length)


class _Lane(NamedTuple):
    """The upper edge and the height of a stage's boxes, in rows."""

    top: float
    height: float


def _lanes(spans: Sequence[Span]) -> dict[tuple[int, int], _Lane]:
    """The lane of each worker's stages, and that of the caller, by :func:`_place`."""
    lanes = {}
    places = sorted(set(map(_place, spans)))
    for worker, group in groupby(places, lambda place: place[0]):
        stages = list(group)
        height = 0.8 / len(stages)
        for k, place in enumerate(stages):
            lanes[place] = _Lane(worker - 0.4 + k * height, height)
    return lanes


def _place(span: Span) -> tuple[int, int]:
    """The worker and the stage of an action; all actions of the caller have one place."""
    return span.worker, CALLER if span.action.by_caller else span.action.j


def _draw_boxes(
    axes: Axes,
    spans: Sequence[Span],
    lanes: Mapping[tuple[int, int], _Lane],
    color: str,
    begin: float,
    points: float,
) -> None:
    narrow = median((span.end - span.start) * points for span in spans) < 3
    boxes = defaultdict(list)
    for span in spans:
        box = (1e3 * (span.start - begin), 1e3 * (span.end - span.start))
        boxes[lanes[_place(span)]].append(box)
    for lane, chosen in boxes.items():
        axes.broken_barh(
            chosen, lane, facecolor=color, edgecolor="white", linewidth=0.15 if narrow else 0.6
        )
    fitting = [
        span
        for span in spans
        if (span.end - span.start) * points > _POINTS * len(str(span.action.i))
    ]
    if len(lanes) > _ROWS or len(fitting) < _MOST_FIT * len(spans):
        return
    for span in fitting:
        lane = lanes[_place(span)]
        axes.text(
            1e3 * ((span.start + span.end) / 2 - begin),
            lane.top + lane.height / 2,
            str(span.action.i),
            ha="center",
            va="center",
            fontsize=8,
            color="white" if span.action.kind in _DARK else "black",
        )


def _draw_pixels(
    axes: Axes, spans: Sequence[Span], color: str, begin: float, length: float, workers: int
) -> None:
    """Draw the actions of a kind as an image, as boxes would be narrower than a pixel."""
    from matplotlib.colors import to_rgb

    image = np.zeros((workers, _PIXELS, 4))
    image[..., :3] = to_rgb(color)
    scale = _PIXELS / length
    for worker, _, start, end in spans:
        first, last = (start - begin) * scale, (end - begin) * scale
        image[worker, round(first) : max(round(last), int(first) + 1), 3] = 1.0
    extent = (0, 1e3 * length, workers - 0.5, -0.5)
    axes.imshow(image, aspect="auto", interpolation="nearest", extent=extent)


def _lines(workers: Sequence[str]) -> int:
    return max((1 + name.count("\n") for name in workers), default=1)


def _frame(axes: Axes, workers: Sequence[str], length: float) -> None:
    lines = _lines(workers) * len(workers)
    size = min(10.0, max(_SMALLEST, 10 * _LINES / max(1, lines)))
    every = max(1, ceil(len(workers) / _NAMES), ceil(lines * size / (10 * _LINES)))
    axes.set_yticks(range(0, len(workers), every), workers[::every], fontsize=size)
    axes.set_ylim(len(workers) - 0.45, -0.55)
    axes.set_xlim(0, length)
    axes.set_facecolor("#f1f1f1")
    axes.tick_params(axis="y", length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        legend = {"ncols": len(_COLORS), "frameon": False, "borderaxespad": 0.3}
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), **legend)
