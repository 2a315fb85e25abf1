"""Shows a plan: tables of stages and alternatives, a timeline, and the memory over time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from math import inf
from typing import TYPE_CHECKING, Literal

import numpy as np
from rich.console import Console
from rich.table import Column, Table

from lightning_gpipe.core.planner import Plan, Prediction, StagePrediction
from lightning_gpipe.core.schedules import Span
from lightning_gpipe.core.show.picture import check_can_draw, draw_timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ROWS = 32  # with more, stages of equally large layers share one


def show_plan(plan: Plan) -> None:
    """Print both tables; in a file, they are as wide as they need."""
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(plan_table(plan.prediction))
    if plan.alternatives:
        console.print(alternatives_table(plan))


def plan_table(prediction: Prediction) -> Table:
    """List the stages, one row each::

        stage  device  layers           number  parameters  ms     memory, GiB  of
            0       0  embed .. blocks.5     7     40,960  12.31         10.22  24
            1       1  blocks.6 .. head      7     41,123  12.05          9.80  24

    The memory is the peak, followed by its parts. If there are many, those with as many layers and
    parameters share a row, with the least and the most of what differs.
    """
    table = Table(title=headline(prediction))
    for name in ("stage", "device", "layers", "number", "parameters", time_unit(prediction.unit)):
        table.add_column(name, justify="left" if name == "layers" else "right")
    for name in ("GiB", "of", "held", "activations", "boundaries", "outputs", "sent"):
        table.add_column(name, justify="right")
    many = len(prediction.stages) > _ROWS
    for _, group in groupby(enumerate(prediction.stages), lambda row: _kind(*row, many=many)):
        (j, first), *others = group
        end, last = others[-1] if others else (j, first)
        stages = [first, *(stage for _, stage in others)]
        table.add_row(
            _from_to(j, end),
            _from_to(first.device, last.device),
            _from_to(first.layers[0], last.layers[-1]),
            f"{len(first.layers)}",
            f"{first.parameters:,}",
            _range([stage.time for stage in stages], partial(time_cell, unit=prediction.unit)),
            _range([stage.memory.total for stage in stages], _gib),
            "" if first.limit == inf else _gib(first.limit),
            *(_range(sizes, _gib) for sizes in zip(*map(_parts, stages), strict=True)),
        )
    return table


def _kind(j: int, stage: StagePrediction, *, many: bool) -> tuple[float, ...]:
    return (len(stage.layers), stage.parameters, stage.limit) if many else (j,)


def _parts(stage: StagePrediction) -> tuple[float, ...]:
    return (stage.memory.held, *stage.memory[4:], stage.sent)


def _range(numbers: Sequence[float], cell: Callable[[float], str]) -> str:
    return _from_to(cell(min(numbers)), cell(max(numbers)))


def _from_to(first: object, last: object) -> str:
    return " .. ".join(dict.fromkeys([f"{first}", f"{last}"]))


def alternatives_table(plan: Plan) -> Table:
    """List the alternatives, and why they were not chosen::

    stages  chunks  recomputed  schedule    split  on host     ms   GiB   why not
         8      16           0  fill_drain  no                     26.1  lacks 2.1 GiB on stage 0
         8      32      0 to 8  fill_drain  no     weights  512.3   22.0  3.1% slower: ...

    With replicas there is a column for what they divide.
    """
    right = partial(Column, justify="right")
    divided = ["divided"] if plan.prediction.replicas > 1 else []
    table = Table(
        *map(right, ("stages", "chunks", "recomputed")),
        *("schedule", "split", "on host"),
        *divided,
        *map(right, (time_unit(plan.prediction.unit), "bubble", "GiB")),
        "why not",
        title="alternatives",
    )
    for alternative in plan.alternatives:
        prediction = alternative.prediction
        settings, fits = prediction.settings, not any(prediction.missing)
        table.add_row(
            f"{len(settings.balance)}",
            f"{settings.chunks}",
            " to ".join(map(str, sorted({min(settings.recomputed), max(settings.recomputed)}))),
            str(settings.order.schedule),
            "yes" if settings.order.split else "no",
            settings.on_host,
            *[settings.sharding or ""] * len(divided),
            time_cell(prediction.time, prediction.unit) if fits else "",
            f"{prediction.bubble:.1%}" if fits else "",
            _gib(max(stage.needed for stage in prediction.stages)),
            alternative.reason,
        )
    return table


def headline(prediction: Prediction) -> str:
    """Return the chosen settings and the predicted time in one line."""
    chosen = prediction.settings
    unit = prediction.unit
    text = (
        f"{len(chosen.balance)} stages, {', '.join(chosen.arguments)}: "
        f"{time_cell(prediction.time, unit)} "
        f"{time_unit(unit)} for a mini-batch of {sum(prediction.rows)} rows, bubble "
        f"{prediction.bubble:.1%}"
    )
    return text + (f", {prediction.throughput:,.4g} rows/s" if unit == "s" else "")


def time_unit(unit: Literal["s", "FLOP"]) -> str:
    """Return the unit in which times are shown."""
    return "ms" if unit == "s" else "GFLOP"


def time_cell(time: float, unit: Literal["s", "FLOP"]) -> str:
    """Return a time in the unit in which it is shown."""
    return f"{time * 1e3:,.2f}" if unit == "s" else f"{time / 1e9:,.2f}"


def _gib(size: float) -> str:
    return f"{size / 2**30:,.3g}"


_RED, _BLUE = "#b03030", "#3b75af"
_TIMES = 1600  # about one per pixel
_LINES = 8  # with more devices, the range is drawn: the lines could not be told apart


def plan_picture(prediction: Prediction) -> Figure:
    """Draw the predicted timeline, and the memory of each device over time, with matplotlib."""
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
