"""A front-end of another kind serves a GPipe: one for a model that lists its blocks itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_gpipe import GPipe, whole
from lightning_gpipe.core.frontends import frontend_of
from lightning_gpipe.core.frontends.frontend import Frontend, OwnerProcesses, RunProgram
from lightning_gpipe.core.layout import Partition
from lightning_gpipe.core.programs import Program, Step, Value
from tests.support.models import assert_same
from tests.support.pipes import every_mode

WIDTH = 4


class Block(nn.Linear):
    def forward(self, x: Tensor, bias: Tensor) -> Tensor:  # type: ignore[override]  # a block
        return super().forward(x).tanh() + bias


class Model(nn.Module):
    """Blocks in a list, and something before and after them."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, WIDTH) for _ in range(blocks))
        self.last = nn.Linear(WIDTH, 2)
        self.bias = nn.Parameter(torch.linspace(-1, 1, WIDTH))

    def hidden(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, self.bias)
        return x

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return self.last(self.hidden(self.first(x))) * scale


class Hidden(Frontend):
    """Makes a program of the method ``hidden`` of a :class:`Model`."""

    def __init__(self, root: nn.Module, path: str) -> None:
        super().__init__(root)
        assert isinstance(root, Model)
        self._own, self._path = root, path
        self._partitions: list[Partition] = []

    @property
    @override
    def owner(self) -> nn.Module:
        return self._own

    @property
    @override
    def units(self) -> Sequence[str]:
        return [f"{self._path}.{k}" for k in range(len(self._own.blocks))]

    @property
    @override
    def unit_modules(self) -> Iterable[nn.Module]:
        return self._own.blocks

    @override
    def partitions(self, balance: Sequence[int]) -> list[Partition]:
        first = 0
        for j, size in enumerate(balance):
            layers = tuple(self._own.blocks[first : first + size])
            names = tuple(self.units[first : first + size])
            self._partitions.append(Partition(j, first, layers, names))
            first += size
        return self._partitions

    @override
    def install(self, run: RunProgram, processes: OwnerProcesses | None = None) -> None:
        steps: list[Step] = []
        for partition in self._partitions:
            for layer, name in zip(partition.layers, partition.names, strict=True):
                args = Value(len(steps) + 1) if steps else Value(0), Value(1)
                steps.append(Step(layer, args, len(steps) + 2, partition.index, name=name))
        program = Program(steps, inputs=[0, 1], outputs=[len(steps) + 1], n=len(self._partitions))
        self._own.__dict__["hidden"] = lambda x: run(program, [x, whole(self._own.bias)])[0]

    @override
    def remove(self) -> None:
        self._own.__dict__.pop("hidden", None)

    @contextmanager
    @override
    def plain(self) -> Iterator[None]:
        hidden = self._own.__dict__.pop("hidden")
        try:
            yield
        finally:
            self._own.__dict__["hidden"] = hidden


@pytest.fixture(autouse=True)
def hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(frontend_of.__globals__, "FRONTENDS", ((nn.ModuleList, Hidden),))


def model() -> Model:
    torch.manual_seed(0)
    return Model().double()


def rows(n: int = 7) -> Tensor:
    return torch.linspace(-1, 1, n * WIDTH, dtype=torch.float64).view(n, WIDTH).sin()


@every_mode
def test_model_around_a_module_list(mode: Any) -> None:
    plain, own = model(), model()
    pipeline = GPipe(own, [2, 2], module="blocks", chunks=3, activation_checkpointing=mode)
    found, wanted = pipeline(rows(), scale=2.0), plain(rows(), scale=2.0)
    found.square().sum().backward()
    wanted.square().sum().backward()

    assert_same(found, wanted)
    for one, other in zip(own.parameters(), plain.parameters(), strict=True):
        assert_same(one.grad, other.grad)
    assert list(pipeline.state_dict()) == list(plain.state_dict())
    assert pipeline.timeline is not None
    assert pipeline.timeline.schedule.m == 3
    pipeline.close()


def test_model_finds_what_has_most_of_its_parameters() -> None:
    pipeline = GPipe(model(), [1, 3], chunks=2)

    assert [str(stage.partition) for stage in pipeline.stages] == [
        "blocks.0",
        "blocks.1..3",
    ]


def test_balance_by_names_and_by_parameters() -> None:
    assert GPipe(model(), ["blocks.3"], module="blocks").balance == [3, 1]
    by_parameters = GPipe(model(), "parameters", module="blocks", devices=["cpu", "cpu"])
    assert by_parameters.balance == [3, 1]  # beside what is around, on the last device


def test_model_itself_runs_the_pipeline_until_it_is_released() -> None:
    own = model()
    pipeline = GPipe(own, [2, 2], module="blocks", chunks=3)
    seen: list[Any] = []
    pipeline.observe(seen.append)

    own(rows())
    pipeline.release()
    own(rows())

    assert len(seen) == 1


def test_copy_of_a_pipeline_runs_its_own_model() -> None:
    pipeline = GPipe(model(), [2, 2], module="blocks", chunks=3)
    seen: list[Any] = []
    copied = deepcopy(pipeline)
    copied.observe(seen.append)

    assert_same(copied(rows()), pipeline(rows()))
    assert len(seen) == 1
    assert not set(copied.parameters()) & set(pipeline.parameters())
