from textwrap import dedent

import torch
from rich import box
from rich.console import Console
from torch import nn

from lightning_gpipe.core.layout import lay_out
from lightning_gpipe.core.layout.partition import Partition, cut
from lightning_gpipe.core.show.stages import stage_table


def drawn(partitions: list[Partition], devices: list[str]) -> str:
    table = stage_table([lay_out(partitions, [torch.device(device) for device in devices])], {})
    table.box = box.ASCII2
    console = Console(width=100)
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
