"""A timeline as a picture: a row for each worker, a box for each action, gaps where it waits.

What ran and what a simulation predicts are drawn alike, so they can be laid side by side. Only this
needs matplotlib, which is an extra.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from lightning_gpipe.core.plan import Kind
from lightning_gpipe.core.run import Span

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INSTALL = "pip install 'lightning-gpipe[pictures]'"

_COLORS = {Kind.FORWARD: "#3b75af", Kind.RECOMPUTE: "#a6c8e6", Kind.BACKWARD: "#e8853d"}
_DARK = (Kind.FORWARD, Kind.BACKWARD)  # whose labels are white
_INCHES, _DPI = 12.8, 150  # as wide as a slide: 1920 pixels
_ROWS = 32  # with more, a row has no room for text
_NAMES = 24  # of workers, at most: more would overlap in a part of a figure
_POINTS = 5.5  # the width of a digit in a box
_MOST_FIT = 0.9  # of the labels of a kind: fewer look like a selection that means something
_BOXES = 20_000  # with more, they are narrower than a pixel
_PIXELS = 1600  # between the left and the right of the axes


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def check_can_draw() -> None:
    """Raise if matplotlib is not installed.

    Raises:
        ImportError: Says how to install it.
    """
    if not can_draw():
        raise ImportError(f"drawing needs matplotlib: not installed. Run {INSTALL}.")


def timeline_picture(
    spans: Sequence[Span], workers: Sequence[str], *, title: str = "", note: str = ""
) -> Figure:
    """Draw what ran when, or what is predicted to::

        cuda:0   ▇F0▇▇F1▇▇F2▇             ▇B2▇▇R1▇▇B1▇ ...
        cuda:1        ▇F0▇▇F1▇▇F2▇▇B2▇▇R1▇▇B1▇

    Args:
        spans: The actions, with times in seconds from any beginning.
        workers: What each worker is called; may have several lines.
        title: Above the picture.
        note: Below the title, in smaller letters.

    Returns:
        A figure as wide as a slide; ``figure.savefig("timeline.png")`` writes it.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    check_can_draw()
    from matplotlib.figure import Figure

    height = min(7.2, 1.9 + 0.55 * len(workers))
    figure = Figure(figsize=(_INCHES, height), dpi=_DPI, layout="constrained")
    axes = figure.add_subplot()
    draw_timeline(axes, spans, workers)
    axes.set_title(title, loc="left", fontsize=15, fontweight="bold", pad=26 if note else 8)
    axes.annotate(
        note,
        (0, 1),
        (0, 9),
        xycoords="axes fraction",
        textcoords="offset points",
        fontsize=10.5,
        color="#555555",
    )
    axes.set_xlabel("milliseconds")
    return figure


def draw_timeline(axes: Axes, spans: Sequence[Span], workers: Sequence[str]) -> None:
    """Draw what ran when into axes, as one part of a figure.

    Args:
        axes: matplotlib's.
        spans: The actions, with times in seconds.
        workers: What each worker is called.
    """
    begin = min((span.start for span in spans), default=0.0)
    length = max((span.end for span in spans), default=0.0) - begin or 1e-3
    figure = axes.get_figure(root=True)
    assert figure is not None
    points = 72 * 0.85 * figure.get_figwidth() / length
    several = len({span.action.j for span in spans}) > len({span.worker for span in spans})
    for kind, color in _COLORS.items():
        chosen = [span for span in spans if span.action.kind is kind]
        if not chosen:
            continue
        axes.broken_barh([], (0, 0), facecolor=color, label=kind.verb)  # for the legend
        if len(spans) > _BOXES:
            _draw_pixels(axes, chosen, color, begin, length, len(workers))
            continue
        _draw_boxes(axes, chosen, color, begin, points)
        if len(workers) <= _ROWS:
            _draw_labels(axes, chosen, begin, points, several)
    _frame(axes, workers, 1e3 * length)


def _draw_boxes(axes: Axes, spans: Sequence[Span], color: str, begin: float, points: float) -> None:
    """A box for each action of a kind, with a line around those that are wider than it."""
    narrow = median((span.end - span.start) * points for span in spans) < 3
    for worker in sorted({span.worker for span in spans}):
        boxes = [
            (1e3 * (each.start - begin), 1e3 * (each.end - each.start))
            for each in spans
            if each.worker == worker
        ]
        axes.broken_barh(
            boxes,
            (worker - 0.4, 0.8),
            facecolor=color,
            edgecolor="white",
            linewidth=0.15 if narrow else 0.6,
        )


def _draw_labels(
    axes: Axes, spans: Sequence[Span], begin: float, points: float, several: bool
) -> None:
    """The micro-batch of each action of a kind, if nearly all of them have room for it."""
    labels = [f"{each.action.i}" + (f"/{each.action.j}" if several else "") for each in spans]
    fitting = [
        (span, label)
        for span, label in zip(spans, labels, strict=True)
        if (span.end - span.start) * points > _POINTS * len(label)
    ]
    for span, label in fitting if len(fitting) >= _MOST_FIT * len(spans) else ():
        axes.text(
            1e3 * ((span.start + span.end) / 2 - begin),
            span.worker,
            label,
            ha="center",
            va="center",
            fontsize=8,
            color="white" if span.action.kind in _DARK else "black",
        )


def _draw_pixels(
    axes: Axes, spans: Sequence[Span], color: str, begin: float, length: float, workers: int
) -> None:
    """The actions of a kind as an image, where boxes would be narrower than a pixel."""
    from matplotlib.colors import to_rgb

    image = np.zeros((workers, _PIXELS, 4))
    image[..., :3] = to_rgb(color)
    scale = _PIXELS / length
    for worker, _, start, end in spans:
        first, last = (start - begin) * scale, (end - begin) * scale
        image[worker, round(first) : max(round(last), int(first) + 1), 3] = 1.0
    extent = (0, 1e3 * length, workers - 0.5, -0.5)
    axes.imshow(image, aspect="auto", interpolation="nearest", extent=extent)


def _frame(axes: Axes, workers: Sequence[str], length: float) -> None:
    """The axes around the boxes: the first worker on top, nothing that is not needed."""
    every = -(-len(workers) // _NAMES)
    axes.set_yticks(range(0, len(workers), every), workers[::every])
    axes.set_ylim(len(workers) - 0.45, -0.55)
    axes.set_xlim(0, length)
    axes.set_facecolor("#f1f1f1")
    axes.tick_params(axis="y", length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        legend = {"ncols": 3, "frameon": False, "borderaxespad": 0.3}
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), **legend)
