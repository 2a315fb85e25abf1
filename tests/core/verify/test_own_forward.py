"""Promise: a verification compares programs with what the model's own forward does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_gpipe import GPipe, verify

WIDTH = 4
SCALE = {"of": 1.0}


@pytest.fixture(autouse=True)
def scale() -> None:
    SCALE["of"] = 1.0


class Block(nn.Module):
    """Adds to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).tanh()


class Reads(nn.Module):
    """Reads a global variable between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = Block(), Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        x = self.two(self.one(x) * SCALE["of"])
        return self.three(x)


class Looped(nn.Module):
    """Loops over blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor, *, cache: bool = False) -> dict[str, Tensor]:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return {"x": x, "of all": F.dropout(x, 0.5, self.training and cache)}


class Drops(Block):
    """Drops some of its output."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(super().forward(x))


def piped(model: nn.Module, balance: Any, module: str | None = None) -> GPipe:
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return GPipe(model.double(), balance, module=module, chunks=3, devices=["cpu"] * 2)


def rows(n: int = 7) -> Tensor:
    return torch.linspace(-1, 1, n * WIDTH, dtype=torch.float64).view(n, WIDTH).sin()


@pytest.mark.parametrize(
    "model, balance, module",
    [
        (Reads(), [1, 2], ""),
        (Looped(), [1, 3], "blocks"),
        (nn.ModuleDict({"a": nn.Sequential(Block(), Block())})["a"], [1, 1], None),
    ],
    ids=["traced", "looped", "sequential"],
)
def test_model_that_agrees(model: nn.Module, balance: Any, module: str | None) -> None:
    pipeline = piped(model, balance, module)
    before = {name: value.clone() for name, value in pipeline.state_dict().items()}

    parity = verify(pipeline, rows())

    parity.check()
    assert parity.difference is None
    assert parity.of_programs == (module is not None)
    assert ("and with the model's own forward" in str(parity)) == parity.of_programs
    assert all(parameter.grad is None for parameter in model.parameters())
    assert parity.microbatches == 3
    assert pipeline.chunks == 3
    torch.testing.assert_close(dict(pipeline.state_dict()), before, rtol=0, atol=0)
    pipeline.close()


def test_value_that_a_trace_has_frozen() -> None:
    pipeline = piped(Reads(), [1, 2])
    pipeline(rows())
    SCALE["of"] = 2.0

    parity = verify(pipeline, rows())

    assert parity.difference is not None
    with pytest.raises(RuntimeError, match=r"own forward .* the output of two\.linear \(Linear\)"):
        parity.check()
    pipeline.close()


def test_forward_that_does_not_repeat() -> None:
    class Counts(Reads):
        def forward(self, x: Tensor) -> Tensor:
            SCALE["of"] += 1
            return super().forward(x)

    pipeline = piped(Counts(), [1, 2])
    pipeline(rows())

    with pytest.raises(RuntimeError, match="a forward must compute the same from the same batch"):
        verify(pipeline, rows()).check()
    pipeline.close()


def test_forward_that_draws_is_a_known_reason() -> None:
    pipeline = piped(Looped(), [1, 3], "blocks")

    parity = verify(pipeline, rows(), cache=True)

    parity.check()
    pipeline.close()


def test_dropout_modules_are_no_difference() -> None:
    class Dropping(Reads):
        def __init__(self) -> None:
            super().__init__()
            self.two = Drops()

    pipeline = piped(Dropping(), [1, 3])

    parity = verify(pipeline, rows())

    assert parity.difference is None
    assert parity.of_programs
    pipeline.close()


class Outer(nn.Module):
    """An nn.Sequential within a model."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.net = nn.Sequential(Block(), middle, Block())
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.net(x))


class Centred(nn.Module):
    """Computes across the rows."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


def test_sequential_in_a_model() -> None:
    pipeline = piped(Outer(nn.Tanh()), [1, 2], "net")

    parity = verify(pipeline, rows())

    parity.check()
    assert parity.difference is None
    assert len(parity.compared["gradients"]) == 4
    pipeline.close()


def test_fault_in_a_sequential_in_a_model_is_named() -> None:
    pipeline = piped(Outer(Centred()), [1, 2], "net")

    with pytest.raises(RuntimeError, match=r"the output of layer 1 \('1', Centred, stage 1, cpu\)"):
        verify(pipeline, rows()).check()
    pipeline.close()


def test_call_that_does_not_run_the_pipeline() -> None:
    class Around(Outer):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(x)

    pipeline = piped(Around(nn.Tanh()), [1, 2], "net")

    with pytest.raises(RuntimeError, match="must run the pipeline: it did not.*reach 'net'"):
        verify(pipeline, rows())


def test_modules_of_one_model_are_all_verified() -> None:
    class Both(Outer):
        def __init__(self) -> None:
            super().__init__(nn.Tanh())
            self.second = nn.Sequential(Block(), Centred())

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.net(x))

    torch.manual_seed(0)
    pipeline = GPipe(Both().double(), [[1, 2], [1, 1]], module=["net", "second"], chunks=3)

    with pytest.raises(RuntimeError, match=r"the output of layer 1 \('1', Centred"):
        verify(pipeline, rows()).check()
    pipeline.close()


class Mixed(nn.Module):
    """An nn.Sequential with a dropout, and blocks that a forward loops over."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(Block(), nn.Dropout(0.5), Block())
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.net(x)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("modules", [["net", "blocks"], ["blocks", "net"]])
def test_dropout_of_a_sequential_beside_other_programs_is_no_difference(modules: list[str]) -> None:
    """A run of the nn.Sequential switched its dropout on again: a known reason where none was."""
    torch.manual_seed(0)
    balances = {"net": [1, 2], "blocks": [1, 1]}
    pipeline = GPipe(
        Mixed().double(), [balances[name] for name in modules], module=modules, chunks=3
    )

    parity = verify(pipeline, rows())

    assert parity.difference is None, str(parity)
    assert parity.of_programs
    assert pipeline.get_submodule("net.1").p == 0.5
    pipeline.close()
