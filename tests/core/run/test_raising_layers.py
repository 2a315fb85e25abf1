"""The layer that raised an error, in the note on it: its path and its class."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_gpipe import is_recomputing
from lightning_gpipe.core.pipeline import GPipe
from tests.support.faults import OwnError
from tests.support.models import rows, step
from tests.support.pipes import Pipe, with_and_without_threads

pytestmark = with_and_without_threads


class Faulty(nn.Module):
    """A sine, where it does not fail."""

    def __init__(self, when: Callable[[], bool] = lambda: True) -> None:
        super().__init__()
        self.when = when

    def forward(self, x: Tensor) -> Tensor:
        self.check()
        return x.sin()

    def check(self, *_: Any) -> None:
        if self.when():
            raise OwnError


class Block(nn.Module):
    """A linear layer and another one, with a residual connection."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 3), inner)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Checkpointed(Block):
    """Runs its layers again in backward."""

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.inner, x, use_reentrant=False)


class Hooked(Faulty):
    """Fails in the backward of its output."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 1
        y.register_hook(self.check)
        return y


class Loop(nn.Module):
    """Loops over blocks."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Traced(nn.Module):
    """Calls its layers by itself, on two ways."""

    def __init__(self, last: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        return x + self.last(self.first(x))


def layers(last: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), last).double()


def note_of(pipeline: GPipe, kind: type[Exception] = OwnError) -> str:
    """The last note on the error of a step, which names the stage."""
    with pytest.raises(kind) as caught:
        step(pipeline, rows(7))
    note: str = caught.value.__notes__[-1]
    return note


def test_layer_within_a_layer(pipe: Pipe) -> None:
    note = note_of(pipe(layers(Block(Faulty()))))

    assert note == (
        "raised in forward of micro-batch 0 of 3 on stage 1 (layers 1..2, cpu), "
        "in layer 2.inner.1 (Faulty)"
    )


def test_layer_of_another_size(pipe: Pipe) -> None:
    assert note_of(pipe(layers(nn.Linear(4, 4))), RuntimeError).endswith(", in layer 2 (Linear)")


def test_block_of_a_loop(pipe: Pipe) -> None:
    model: Any = Loop(*(Block(Faulty(bool)) for _ in range(3)), Block(Faulty())).double()

    assert note_of(pipe(model, [2, 2])).endswith(", in blocks.3.inner.1 (Faulty)")


def test_layer_of_a_traced_model(pipe: Pipe) -> None:
    model: Any = Traced(Block(nn.Linear(4, 4))).double()

    note = note_of(pipe(model, [1, 2]), RuntimeError)

    assert note.endswith(", in last.inner.1 (Linear)")


def test_layer_that_fails_in_its_recomputation(pipe: Pipe) -> None:
    note = note_of(pipe(layers(Faulty(is_recomputing)), mode="always"))

    assert note.startswith("raised in recompute of")
    assert note.endswith(", in layer 2 (Faulty)")


def test_hook_of_a_layer_that_fails_in_backward(pipe: Pipe) -> None:
    note = note_of(pipe(layers(Hooked()), mode="never"))

    assert note.startswith("raised in backward of")
    assert note.endswith(", in layer 2 (Hooked)")


def test_layer_that_runs_again_in_backward(pipe: Pipe) -> None:
    calls: list[None] = []

    def again() -> bool:
        calls.append(None)
        return len(calls) > 3  # after the forwards of three micro-batches

    note = note_of(pipe(layers(Checkpointed(Faulty(again))), mode="never"))

    assert note.startswith("raised in backward of")
    assert note.endswith(", in layer 2.inner.1 (Faulty)")


class Raising(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise OwnError


class Unknown(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Raising.apply(x)
        return y


def test_operator_whose_layer_is_not_known_in_backward(pipe: Pipe) -> None:
    note = note_of(pipe(layers(Unknown()), mode="never"))

    assert note == "raised in backward of micro-batch 2 of 3 on stage 1 (layers 1..2, cpu)"


def test_error_is_freed_with_its_last_reference(pipe: Pipe) -> None:
    """Frames keep the values that are read from them: an error among these would keep itself."""
    pipeline = pipe(layers(Faulty()), threads=False)
    alive: list[weakref.ref[OwnError]] = []
    gc.disable()
    try:
        try:
            step(pipeline, rows(7))
        except OwnError as error:
            alive.append(weakref.ref(error))
        assert alive[0]() is None
    finally:
        gc.enable()
