"""A plan as tables: what each stage runs, takes and needs; and what else there was to choose."""

from __future__ import annotations

import sys
from itertools import groupby
from math import inf

from rich.console import Console
from rich.table import Table

from lightning_gpipe.core.plan import Plan, Prediction, StagePrediction

_ROWS = 32  # of a table that a person reads


def show_plan(plan: Plan) -> None:
    """Print both tables; into a file, as wide as they are."""
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(plan_table(plan.prediction))
    if plan.alternatives:
        console.print(alternatives_table(plan))


def plan_table(prediction: Prediction) -> Table:
    """List the stages, one row each; of many stages, those that are equal are in one::

        stage  device  layers           number  parameters  ms     memory, GiB  of
            0       0  embed .. blocks.5     7     40,960  12.31         10.22  24
            1       1  blocks.6 .. head      7     41,123  12.05          9.80  24

    The memory is that at the peak, followed by what it is made of.
    """
    table = Table(title=headline(prediction))
    for name in ("stage", "device", "layers", "number", "parameters", time_unit(prediction)):
        table.add_column(name, justify="left" if name == "layers" else "right")
    for name in ("GiB", "of", "held", "activations", "boundaries", "outputs", "sent"):
        table.add_column(name, justify="right")
    cells = [_cells(prediction, stage) for stage in prediction.stages]
    numbered = enumerate(zip(prediction.stages, cells, strict=True))
    many = len(cells) > _ROWS
    for _, run in groupby(numbered, lambda each: each[1][1] if many else each[0]):
        (j, (first, shown)), *others = run
        end, (last, _) = others[-1] if others else (j, (first, shown))
        table.add_row(
            _from_to(j, end),
            _from_to(first.device, last.device),
            _from_to(first.layers[0], last.layers[-1]),
            *shown,
        )
    return table


def _cells(prediction: Prediction, stage: StagePrediction) -> tuple[str, ...]:
    """What is shown of a stage, but for which it is."""
    memory = stage.memory
    sizes = (*memory[4:], stage.sent)
    return (
        f"{len(stage.layers)}",
        f"{stage.parameters:,}",
        _time(prediction, stage.time),
        _gib(memory.total),
        "" if stage.limit == inf else _gib(stage.limit),
        _gib(memory.held),
        *map(_gib, sizes),
    )


def _from_to(first: object, last: object) -> str:
    return " .. ".join(dict.fromkeys([f"{first}", f"{last}"]))


def alternatives_table(plan: Plan) -> Table:
    """List what was not chosen, and why::

    stages  chunks  recomputed  schedule    split      ms   GiB   why not
         8      16           0  fill_drain  no              26.1  lacks 2.1 GiB on stage 0
         8      32           8  fill_drain  no      512.3   22.0  3.1% slower: ...
    """
    table = Table(title="alternatives")
    for name in ("stages", "chunks", "recomputed"):
        table.add_column(name, justify="right")
    table.add_column("schedule")
    table.add_column("split")
    for name in (time_unit(plan.prediction), "bubble", "GiB"):
        table.add_column(name, justify="right")
    table.add_column("why not")
    for each in plan.alternatives:
        found = each.prediction
        fits = not any(found.missing)
        table.add_row(
            f"{len(found.settings.balance)}",
            f"{found.settings.chunks}",
            f"{max(found.settings.recomputed)}",
            found.settings.order.schedule,
            "yes" if found.settings.order.split else "no",
            _time(found, found.time) if fits else "",
            f"{found.bubble:.1%}" if fits else "",
            _gib(max(stage.needed for stage in found.stages)),
            each.reason,
        )
    return table


def headline(prediction: Prediction) -> str:
    """What was chosen, and what it is predicted to take, in a line."""
    chosen = prediction.settings
    written = f", {chosen.order.written}" if chosen.order.written else ""
    text = (
        f"{len(chosen.balance)} stages, chunks={chosen.chunks}, activation_checkpointing="
        f"{chosen.activation_checkpointing!r}{written}: {_time(prediction, prediction.time)} "
        f"{time_unit(prediction)} for a mini-batch of {sum(prediction.rows)} rows, bubble "
        f"{prediction.bubble:.1%}"
    )
    return text + (f", {prediction.throughput:,.4g} rows/s" if prediction.unit == "s" else "")


def time_unit(prediction: Prediction) -> str:
    """The unit in which times are shown."""
    return "ms" if prediction.unit == "s" else "GFLOP"


def _time(prediction: Prediction, time: float) -> str:
    return f"{time * 1e3:,.2f}" if prediction.unit == "s" else f"{time / 1e9:,.2f}"


def _gib(size: float) -> str:
    return f"{size / 2**30:,.3g}"
