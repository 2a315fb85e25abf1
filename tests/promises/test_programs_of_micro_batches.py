"""Transparency: with a loss for each micro-batch, each may call the layers in another way.

Libraries make no mask for a batch without padding. So where a training step runs for each
micro-batch, some micro-batches have a mask and some have none, and each has its own program. It was
refused in the middle of a fit, when the first such batch came. Here are also the tests of
``caller_task``.
"""

import threading
import time
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe.core.pipeline import GPipe
from lightning_gpipe.core.schedules import ActivationCheckpointing, ByMicroBatch
from tests.support.models import assert_same, gradients
from tests.support.pipes import every_mode, with_and_without_threads

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")

TOKENS, WIDTH = 11, 4

PADDED = torch.tensor([[1, 2, 0], [3, 0, 0], [4, 5, 0], [6, 7, 0]])
WITHOUT = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 1, 2]])
FIRST = torch.cat([PADDED[:1], WITHOUT[1:]])
LAST = torch.cat([WITHOUT[:3], PADDED[3:]])
TURNS = torch.cat([PADDED[:1], WITHOUT[:2], PADDED[1:], WITHOUT[2:]])


class Block(nn.Module):
    """Ignores what is masked, if anything is."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        seen = x if mask is None else x * mask
        mean = seen.mean(1, keepdim=True)
        return x + self.dropout(self.out(torch.tanh(self.mix(x) + mean)))


class Padded(nn.Module):
    """Makes a mask only where there is padding, which is 0."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, 2)
        self.double()

    def mask(self, tokens: Tensor) -> Tensor | None:
        used = tokens > 0
        return None if bool(used.all()) else used[..., None].double()

    def forward(self, tokens: Tensor) -> Tensor:
        x, mask = self.embedding(tokens), self.mask(tokens)
        for layer in self.layers:
            x = layer(x, mask=mask)
        return self.head(x)


class Stack(nn.Module):
    """Is traced; returns more where there is a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        first, second, third, fourth = self.layers
        x = y = first(x, mask)
        x = fourth(third(second(x, mask), mask), mask)
        return x if mask is None else (x, y)


class Traced(Padded):
    """Has its layers in a module that is traced."""

    def __init__(self) -> None:
        super().__init__(0)
        self.stack = Stack()
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        mask = self.mask(tokens)
        found = self.stack(self.embedding(tokens), mask)
        return self.head(found if mask is None else found[0] + found[1])


def check_steps(model: GPipe, plain: nn.Module, schedule: ByMicroBatch = "1f1b") -> None:
    """Compare some steps with those of the plain module, on four micro-batches of equal size."""
    for tokens in (FIRST, LAST, TURNS, PADDED, WITHOUT, FIRST):
        loss = model.by_micro_batch(
            lambda x: model(x).square().mean(), tokens, schedule=schedule
        ).loss
        assert loss is not None
        loss.backward()
        expected = torch.stack([plain(x).square().mean() for x in tokens.chunk(4)]).mean()
        expected.backward()
        assert_same([loss.detach(), gradients(model)], [expected.detach(), gradients(plain)])


@every_mode
@with_and_without_threads
@pytest.mark.parametrize("build, path", [(Padded, "layers"), (Traced, "stack")])
def test_mask_of_some_micro_batches(
    build: type[Padded], path: str, mode: ActivationCheckpointing, threads: bool
) -> None:
    plain = build()
    model = GPipe(
        deepcopy(plain),
        [1, 1, 2] if path == "layers" else [3, 3, 6],
        module=path,
        devices=["cpu"] * 3,
        chunks=4,
        threads=threads,
        activation_checkpointing=mode,
    )
    check_steps(model, plain)
    model.close()


@with_and_without_threads
@pytest.mark.parametrize("schedule", ["zero_bubble", "zero_bubble_v"])
def test_mask_of_some_micro_batches_in_other_schedules(
    schedule: ByMicroBatch, threads: bool
) -> None:
    plain = Padded()
    stages = 4 if schedule == "zero_bubble_v" else 2
    model = GPipe(
        deepcopy(plain),
        [4 // stages] * stages,
        module="layers",
        devices=["cpu"] * 2,
        chunks=4,
        threads=threads,
        activation_checkpointing="never",
        folded=schedule == "zero_bubble_v",
    )
    for tokens in (FIRST, LAST, FIRST):
        loss = model.by_micro_batch(
            lambda x: model(x).square().mean(), tokens, schedule=schedule
        ).loss
        assert loss is not None
        loss.backward()
        plain(tokens).square().mean().backward()
    assert_same(gradients(model), gradients(plain))
    model.close()


def test_no_worker_runs_while_the_caller_tries_the_blocks() -> None:
    """A call of a new kind was tried on a few rows while stages ran the same blocks."""
    caller = threading.current_thread()
    working: list[int] = []
    seen: list[int] = []

    def enter(*_: Any) -> None:
        if threading.current_thread() is not caller:
            working.append(1)
        time.sleep(0.002)

    def leave(*_: Any) -> None:
        if threading.current_thread() is caller:
            seen.append(len(working))
        else:
            working.pop()

    plain = Padded()
    model = deepcopy(plain)
    for block in model.layers:
        block.register_forward_pre_hook(enter)
        block.register_forward_hook(leave)
    pipeline = GPipe(model, [2, 2], module="layers", devices=["cpu"] * 2, chunks=4, threads=True)
    check_steps(pipeline, plain)
    pipeline.close()
    assert seen and not any(seen)


def test_traces_while_stages_run() -> None:
    """A trace met the shadows of stages: "it computes with parameters that it does not read"."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Block() for _ in range(4))

        def forward(self, x: Tensor, scale: float) -> Tensor:
            for layer in self.layers:
                x = layer(x) * scale
            return x

    plain = Scaled().double()
    model = GPipe(deepcopy(plain), [6, 6], devices=["cpu"] * 2, chunks=5, threads=True)
    x = torch.randn(5, 3, WIDTH, dtype=torch.float64)
    for step in range(2):  # each call with another constant is traced

        def loss(module: nn.Module, k: float, step: int = step) -> Tensor:
            return module(x[int(k)][None], 1 + k + 5 * step).square().mean()

        found = model.by_micro_batch(lambda k: loss(model, float(k)), torch.arange(5)).loss
        assert found is not None
        found.backward()
        for k in range(5):
            (loss(plain, float(k)) / 5).backward()
    model.close()
    assert_same(gradients(model), gradients(plain))


def test_blocks_that_count_while_others_are_called() -> None:
    """Blocks run while the forward of the next micro-batch calls them, and change attributes."""

    class Counting(Padded):
        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embedding(tokens)
            for layer in self.layers:
                x = layer(x)
                time.sleep(0.001)
            return self.head(x)

    def count(block: Any, *_: Any) -> None:
        block.calls = getattr(block, "calls", 0) + 1
        block.latest = torch.ones(1)

    plain = Counting()
    for block in plain.layers:
        block.register_forward_pre_hook(count)
    model = GPipe(
        deepcopy(plain), [2, 2], module="layers", devices=["cpu"] * 2, chunks=4, threads=True
    )
    check_steps(model, plain)
    model.close()
