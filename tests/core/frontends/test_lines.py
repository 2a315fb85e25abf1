"""Errors name lines of the user's code, and none of a library's."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from inspect import getsourcelines

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_gpipe.core.frontends import lines
from lightning_gpipe.core.frontends.lines import (
    calling_line,
    checkpointed_line,
    current_line,
    is_users,
    line_of,
)


def line_in(function: Callable[..., object], number: int) -> str:
    """The line of a function in this file, counted from its ``def``."""
    return f"{__file__}:{getsourcelines(function)[1] + number}"


def here() -> str:
    return current_line()


def test_line_that_runs() -> None:
    assert here() == line_in(here, 1)


class Asks(nn.Module):
    """Returns the line that calls it, outside of its own ``__call__``."""

    line = ""

    def __call__(self, x: Tensor) -> Tensor:
        self.line = calling_line()
        return x


def calls(module: nn.Module) -> None:
    module(torch.ones(1))


def test_line_that_calls_a_module() -> None:
    module = Asks()

    calls(module)

    assert module.line == line_in(calls, 1)


def test_line_that_calls_activation_checkpointing() -> None:
    found: list[str] = []

    def run(x: Tensor) -> Tensor:
        found.append(checkpointed_line())
        return x

    def checkpoints() -> None:
        checkpoint(run, torch.ones(1, requires_grad=True), use_reentrant=False)

    checkpoints()

    assert found == [line_in(checkpoints, 1)]
    assert checkpointed_line() == ""


def fails() -> None:
    nn.Linear(2, 2)(torch.ones(3))


def test_line_that_raised() -> None:
    with pytest.raises(RuntimeError) as caught:
        fails()

    assert line_of(caught.value) == f"{line_in(fails, 1)}: nn.Linear(2, 2)(torch.ones(3))"
    assert line_of(RuntimeError("raised nowhere")) == ""


def test_files_of_the_user() -> None:
    assert is_users(__file__)
    assert is_users(pytest.__file__), "an installed package may be where the model is from"
    assert not any(map(is_users, [torch.__file__, lines.__file__, textwrap.__file__]))
