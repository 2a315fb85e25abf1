import io
from collections.abc import Sequence
from textwrap import dedent

import pytest
import torch
from rich import box
from rich.console import Console
from torch import nn

from lightning_gpipe.core.balance import StageCosts
from lightning_gpipe.core.layout import lay_out
from lightning_gpipe.core.layout.partition import Partition, cut
from lightning_gpipe.core.pipeline import GPipe
from lightning_gpipe.core.show.stages import stage_table
from tests.support.pipes import Pipe
from tests.support.skip_layers import pair


def drawn(
    partitions: list[Partition],
    devices: list[str],
    width: int = 100,
    measured: Sequence[StageCosts] = (),
) -> str:
    layout = lay_out(partitions, [torch.device(device) for device in devices])
    table = stage_table([layout], {}, measured)
    table.box = box.ASCII2
    console = Console(width=width)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_one_row_for_each_stage() -> None:
    module = nn.Sequential(
        nn.Embedding(1000, 8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 1000)
    )

    text = drawn(cut(module, [1, 3, 1]), ["cuda:0", "cuda:1", "cpu"])

    assert text == dedent("""\
        +-------+--------+--------+--------+-----------------+------------+-------+
        | stage | device | layers | number | kinds           | parameters | share |
        +-------+--------+--------+--------+-----------------+------------+-------+
        |     0 | cuda:0 |      0 |      1 | Embedding       |      8,000 | 46.7% |
        |     1 | cuda:1 |   1..3 |      3 | Linear x2, ReLU |        144 |  0.8% |
        |     2 | cpu    |      4 |      1 | Linear          |      9,000 | 52.5% |
        +-------+--------+--------+--------+-----------------+------------+-------+
    """)


def test_titles_are_whole_in_a_narrow_console() -> None:
    """In 80 columns, which many terminals have, the title of a column was ``paramete…``."""
    layers = [nn.Linear(8, 8), nn.ReLU(), nn.LayerNorm(8), nn.Embedding(8, 8)]

    text = drawn(cut(nn.Sequential(*layers), [3, 1]), ["cuda:0", "cuda:1"], width=66)

    assert "| stage | device | layers | number | kinds" in text
    assert "| parameters | share |" in text


def test_measured_costs_in_a_narrow_console() -> None:
    """They left one letter for the kinds in 80 columns, and a stage took eight lines."""
    layers = tuple(nn.Linear(1999, 1999) for _ in range(4))
    names = tuple(f"encoder.layers.{k}" for k in range(4))
    partitions = [Partition(j // 2, j, layers[j : j + 2], names[j : j + 2]) for j in (0, 2)]

    text = drawn(partitions, ["cuda:0", "cuda:1"], 80, [StageCosts(1.5, 2e9, "s")] * 2)

    assert text == dedent("""\
        +-------+--------+------------------+--------+------------+----------+---------+
        | stage | device |           layers | number | parameters |       ms |     MiB |
        +-------+--------+------------------+--------+------------+----------+---------+
        |     0 | cuda:0 | encoder.layers.0 |      2 |  7,996,000 | 1,500.00 | 1,907.3 |
        |       |        |              ..1 |        |            |          |         |
        |     1 | cuda:1 | encoder.layers.2 |      2 |  7,996,000 | 1,500.00 | 1,907.3 |
        |       |        |              ..3 |        |            |          |         |
        +-------+--------+------------------+--------+------------+----------+---------+
    """)


def test_parameter_that_stages_share_counts_for_the_first() -> None:
    module = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10, bias=False))
    module[1].weight = module[0].weight

    text = drawn(cut(module, [1, 1]), ["cpu", "cpu"])

    assert "40 | 100.0%" in text
    assert "0 |   0.0%" in text


def test_layers_without_parameters() -> None:
    assert (
        drawn(cut(nn.Sequential(nn.ReLU(), nn.Tanh()), [1, 1]), ["cpu", "cpu"]).count("0.0%") == 2
    )


def cells_of(table: object) -> list[list[str]]:
    console = Console(file=io.StringIO(), width=200)
    console.print(table)
    text = console.file.getvalue()  # type: ignore[attr-defined]  # it is a StringIO
    return [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in text.splitlines()
        if "│" in line
    ]


def test_routes_and_bytes(pipe: Pipe) -> None:
    stash, pop = pair()
    near, far = pair()
    module = nn.Sequential(stash, near, far, nn.Tanh(), pop)
    pipeline = pipe(module, [3, 1, 1], chunks=2)

    before = cells_of(pipeline.skip_layout())
    pipeline(torch.ones(4, 3))
    after = cells_of(pipeline.skip_layout())

    assert [row[1:] for row in before] == [
        ["layer 0", "layer 4", "0 -> 2", "2", ""],
        ["layer 1", "layer 2", "0", "-", ""],
    ]
    assert [row[-1] for row in after] == [str(2 * 3 * 4), ""]


def test_faults_name_the_stage() -> None:
    stash, _ = pair()

    with pytest.raises(TypeError, match=r"stashed by layer 1 \(Stash, stage 1\) and never popped"):
        GPipe(nn.Sequential(nn.Tanh(), stash), [1, 1], devices=["cpu"])


def test_listing_shows_what_leaves_a_stage(pipe: Pipe) -> None:
    stash, pop = pair()
    pipeline = pipe(nn.Sequential(stash, nn.Tanh(), pop), stages=3, chunks=2)
    pipeline(torch.ones(4, 3))

    first, second, third = cells_of(pipeline.listing())

    assert first[-1].startswith("2: ")
    assert first[-1].endswith("(24 B)")
    assert second[-1] == third[-1] == ""
