"""Runs traced models in the engine, and compares them with the plain ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe.core.data import map_tensors, tree_flatten
from lightning_gpipe.core.frontends.traced import TracedForward
from lightning_gpipe.core.schedules import ActivationCheckpointing
from tests.support.models import assert_same, gradients
from tests.support.pipes import even
from tests.support.programs import Running

SIZES = [3, 2, 2]  # the micro-batches of 7 rows


class Tracing:
    """Makes models run as pipelines, and ends that at the end of the test."""

    def __init__(self, mode: ActivationCheckpointing, threads: bool) -> None:
        self._mode = mode
        self._threads = threads
        self._made: list[tuple[TracedForward, Running]] = []

    def __call__(
        self, model: nn.Module, balance: int | Sequence[int] = 2, *, copy: bool = True
    ) -> nn.Module:
        """A copy of ``model`` that runs as a pipeline.

        Args:
            model: The model.
            balance: The number of units in each stage, or the number of stages.
            copy: Whether to leave ``model`` itself alone.
        """
        piped = deepcopy(model) if copy else model
        traced = TracedForward(piped, "")
        if isinstance(balance, int):
            balance = even(len(traced.units), balance)
        partitions = traced.partitions(balance)
        stages = [partition.layers for partition in partitions]
        running = Running(stages, ["cpu"] * len(stages), mode=self._mode, threads=self._threads)
        traced.install(running)
        self._made.append((traced, running))
        return piped

    def close(self) -> None:
        """End all."""
        for traced, running in self._made:
            running.close()
            traced.remove()


@pytest.fixture
def tracing(mode: ActivationCheckpointing, threads: bool) -> Iterator[Tracing]:
    """Makes the pipelines of a test."""
    made = Tracing(mode, threads)
    yield made
    made.close()


def assert_same_run(
    piped: nn.Module,
    plain: Callable[..., Any],
    *args: Any,
    of: nn.Module | None = None,
    buffers: bool = True,
) -> None:
    """A step of both on the same arguments has the same outputs, gradients and buffers.

    Args:
        piped: The model in a pipeline.
        plain: The plain model, or what runs it.
        args: The arguments of both.
        of: The plain model, where something else runs it.
        buffers: Whether to compare buffers.
    """
    module = plain if of is None else of
    assert isinstance(module, nn.Module)
    end = None if buffers else -1
    expected = _step(plain, module, args)[:end]
    assert_same(_step(piped, piped, args)[:end], expected)


def in_microbatches(model: nn.Module) -> Callable[[Tensor], Any]:
    """Runs the plain model on one micro-batch of 7 rows after another, as for batch norms."""

    def run(x: Tensor) -> Any:
        outputs = [model(piece) for piece in x.split(SIZES)]
        if isinstance(outputs[0], Tensor):
            return torch.cat(outputs)
        return {key: torch.cat([output[key] for output in outputs]) for key in outputs[0]}

    return run


def images(rows: int = 7, size: int = 4) -> Tensor:
    """Random images."""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(rows, 3, size, size, generator=generator, dtype=torch.float64)


def _step(run: Callable[..., Any], module: nn.Module, args: Sequence[Any]) -> tuple[Any, ...]:
    module.zero_grad()
    args = map_tensors(_own, list(args))
    output = run(*args)
    leaves = [x for x in tree_flatten(output).leaves if isinstance(x, Tensor) and x.requires_grad]
    torch.stack([(k + 1) * (x**2).sum() for k, x in enumerate(leaves)]).sum().backward()
    inputs = [x.grad for x in tree_flatten(args).leaves if isinstance(x, Tensor)]
    return (
        map_tensors(torch.detach, output),
        gradients(module),
        [x for x in inputs if x is not None],
        {name: buffer.clone() for name, buffer in module.named_buffers()},
    )


def _own(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_(x.is_floating_point())
