"""Tables of plans."""

from __future__ import annotations

from dataclasses import replace

from rich.table import Table

from lightning_gpipe.core.balance import LayerProfile, LinearCost, ModelProfile, Place
from lightning_gpipe.core.planner import Plan, plan_for
from lightning_gpipe.core.schedules import ScheduleName
from lightning_gpipe.core.show.plans import plan_table

LAYER = LayerProfile(
    "", LinearCost(0, 1), LinearCost(0, 1), LinearCost(0, 2), LinearCost(0, 2**30), parameters=10
)


def planned(n: int, schedule: ScheduleName = "fill_drain") -> Plan:
    """A layer for each stage, the last of them a larger one."""
    layers = [replace(LAYER, name=f"blocks.{k}") for k in range(n - 1)]
    head = replace(LAYER, name="head", parameters=99)
    profile = ModelProfile((*layers, head), (), LayerProfile("around"), 1, 4, "s", "cpu")
    return plan_for(profile, [Place()] * n, stages=n, chunks=4, schedule=schedule)


def rows(table: Table) -> list[tuple[str, ...]]:
    columns = [list(column.cells) for column in table.columns]
    return [tuple(map(str, row)) for row in zip(*columns, strict=True)]


def test_a_row_for_each_stage() -> None:
    assert [row[:5] for row in rows(plan_table(planned(3).prediction))] == [
        ("0", "0", "blocks.0", "1", "10"),
        ("1", "1", "blocks.1", "1", "10"),
        ("2", "2", "head", "1", "99"),
    ]


def test_many_stages_with_equally_large_layers_are_one_row() -> None:
    found = rows(plan_table(planned(34, "1f1b").prediction))

    assert [row[:5] for row in found] == [
        ("0 .. 32", "0 .. 32", "blocks.0 .. blocks.32", "1", "10"),
        ("33", "33", "head", "1", "99"),
    ]
    assert [row[9] for row in found] == ["2 .. 4", "1"]  # micro-batches of a GiB


def test_equal_ones_of_many_stages_are_one_row() -> None:
    assert [row[:5] for row in rows(plan_table(planned(500).prediction))] == [
        ("0 .. 498", "0 .. 498", "blocks.0 .. blocks.498", "1", "10"),
        ("499", "499", "head", "1", "99"),
    ]
