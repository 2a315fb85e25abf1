import io

import pytest
import torch
from rich.console import Console
from torch import nn

from lightning_gpipe.core.pipeline import GPipe
from tests.support.pipes import Pipe
from tests.support.skip_layers import pair


def drawn(table: object) -> list[list[str]]:
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

    before = drawn(pipeline.skip_layout())
    pipeline(torch.ones(4, 3))
    after = drawn(pipeline.skip_layout())

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

    first, second, third = drawn(pipeline.listing())

    assert first[-1].startswith("2: ")
    assert first[-1].endswith("(24 B)")
    assert second[-1] == third[-1] == ""
