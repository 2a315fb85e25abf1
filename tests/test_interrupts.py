"""Ctrl-C at any line of the calling thread leaves the layers as they were.

An interrupt strikes whatever the calling thread does just then. Here it strikes each line in turn
of the modules that touch the layers, and a step afterwards must be as one of the plain module.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lightning_gpipe
from lightning_gpipe.core.pipeline import GPipe

CORE = Path(lightning_gpipe.__file__).parent / "core"
TOUCHING = {str(CORE / name) for name in ("shadow.py", "managers.py", "worker.py", "stage_pass.py")}
X = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4)


def interrupted(run: Callable[[], object], at: int) -> bool:
    """Run, with an interrupt at the line of that number; whether there were as many."""
    seen = 0

    def on_line(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal seen
        if event == "line":
            seen += 1
            if seen == at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return on_line

    def on_call(frame: FrameType, event: str, _: Any) -> Any:
        return on_line if frame.f_code.co_filename in TOUCHING else None

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        run()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def gradients(module: nn.Module) -> list[Tensor | None]:
    for parameter in module.parameters():
        parameter.grad = None
    module(X).square().sum().backward()
    return [parameter.grad for parameter in module.parameters()]


@pytest.mark.parametrize("half", ["forward", "backward"])
@pytest.mark.parametrize("threads", [True, False])
def test_interrupt_at_any_line(threads: bool, half: str) -> None:
    """0.1: struck as shadows were put in place, it left them in the layers for ever."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    parameters = list(module.parameters())
    expected = gradients(module)
    pipeline = GPipe(
        module,
        [2, 1],
        devices=["cpu", "cpu"],
        chunks=2,
        activation_checkpointing="always",
        threads=threads,
    )
    gradients(pipeline)

    struck = 0
    while True:
        y = pipeline(X).square().sum() if half == "backward" else None
        run = y.backward if y is not None else lambda: pipeline(X)
        if not interrupted(run, struck + 1):
            break
        struck += 1
        pipeline(X).square().sum().backward()
        assert all(map(lambda a, b: a is b, pipeline.parameters(), parameters))
        torch.testing.assert_close(gradients(pipeline), expected)

    pipeline.close()
    assert struck > 10
