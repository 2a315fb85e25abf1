"""verify() leaves no trace."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_gpipe import GPipe, verify
from lightning_gpipe.core.faithful.random.private_generators import default_generator
from lightning_gpipe.core.layout import Partition, lay_out
from lightning_gpipe.core.profile.walk import following
from lightning_gpipe.core.run.stage import Stage
from lightning_gpipe.core.verify.parity import Parity
from tests.support.models import Call, Counting, perceptron, rows, step
from tests.support.pipes import Pipe
from tests.support.unequal_models import (
    Layers,
    Recurrent,
    W,
    functional_dropout,
    linear,
    sequences,
    sequential,
)


class Lazy(nn.Module):
    """Makes a buffer when it first runs, and puts another in its place every time."""

    def __init__(self) -> None:
        super().__init__()
        self.scale: Tensor | None
        self.replaced: Tensor
        self.register_buffer("scale", None)
        self.register_buffer("replaced", torch.ones(W))

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = torch.ones(W, dtype=x.dtype)
        self.register_buffer("another", torch.ones(()))
        self.replaced = self.replaced + 1
        return x * self.scale


def many_states() -> Layers:
    return [
        nn.Dropout(inplace=True),
        linear(),
        nn.BatchNorm1d(W),
        functional_dropout(),
        Lazy(),
        Counting(),
        nn.utils.parametrizations.spectral_norm(nn.Linear(W, W)),
    ]


def state(pipeline: GPipe) -> dict[str, Any]:
    """All that a run might move on, and whatever hangs on the modules."""
    modules = dict(pipeline.named_modules())
    return {
        "generator": default_generator(torch.device("cpu")).get_state().tolist(),
        "buffers": {
            f"{name}.{key}": (id(buffer), None if buffer is None else buffer.tolist())
            for name, module in modules.items()
            for key, buffer in module._buffers.items()
        },
        "parameters": {
            name: (id(p), p.tolist(), p.grad) for name, p in pipeline.named_parameters()
        },
        "training": {name: module.training for name, module in modules.items()},
        "hooks": {name: len(module._forward_hooks) for name, module in modules.items()},
        "rates": {name: getattr(module, "p", None) for name, module in modules.items()},
        "timeline": id(pipeline.timeline),
    }


@pytest.mark.parametrize("new", [True, False])
@pytest.mark.parametrize(
    "layers, batch", [(many_states, lambda: rows(7)), (lambda: [Recurrent(), linear()], sequences)]
)
def test_nothing_is_left_of_it(
    new: bool, layers: Callable[[], Layers], batch: Callable[[], Tensor], pipe: Pipe
) -> None:
    pipeline, input = pipe(sequential(*layers())), batch()
    if not new:
        pipeline(input)
    torch.manual_seed(3)
    before, input_before = state(pipeline), input.tolist()

    verify(pipeline, input)

    assert state(pipeline) == before
    assert (input.tolist(), input.grad) == (input_before, None)


def test_forward_after_it_expects_no_draws_that_it_saw(pipe: Pipe) -> None:
    """A forward runs twice if it draws after one that did not, which verify() is not."""
    runs: list[bool] = []
    counts: list[int] = []
    draws = False

    def draws_later(x: Tensor) -> Tensor:
        runs.append(draws)
        return x + torch.rand_like(x) if draws else x

    for verified in (False, True):
        pipeline, draws = pipe(sequential(linear(), Call(draws_later))), False
        if verified:
            verify(pipeline, rows(7))
        draws = True
        pipeline(rows(7))
        counts.append(runs.count(True))
        runs.clear()

    assert counts[0] == counts[1]


@pytest.mark.parametrize("rows_that_fail", [range(4), range(4, 8)], ids=["pipelined", "plain"])
def test_nothing_is_left_of_it_after_an_error(rows_that_fail: range, pipe: Pipe) -> None:
    def fails(x: Tensor) -> Tensor:
        if x.size(0) in rows_that_fail and failing:
            raise ValueError("failed")
        return x

    failing: list[bool] = []
    pipeline = pipe(sequential(*many_states(), Call(fails)))
    pipeline(rows(7))
    failing.append(True)
    torch.manual_seed(3)
    before = state(pipeline)

    with pytest.raises(ValueError, match="failed") as raised:
        verify(pipeline, rows(7))

    (note,) = raised.value.__notes__
    assert ("micro-batch" in note) == (0 in rows_that_fail)
    assert ("layer 7, which ran on the whole batch" in note) == (7 in rows_that_fail)
    assert state(pipeline) == before


def test_next_steps_are_those_of_a_pipeline_that_was_not_verified(pipe: Pipe) -> None:
    pipeline = pipe(sequential(*many_states()))
    twin = pipe(nn.Sequential(*pipeline))
    verify(pipeline, rows(7))

    for _ in range(2):
        torch.manual_seed(1)
        actual = step(pipeline, rows(7))
        torch.manual_seed(1)
        expected = step(twin, rows(7))

        assert torch.equal(actual.output, expected.output)
        assert actual.gradients.keys() == expected.gradients.keys()
        for name, gradient in actual.gradients.items():
            assert torch.equal(gradient, expected.gradients[name]), name
    assert all(
        torch.equal(one, other)
        for one, other in zip(pipeline.buffers(), twin.buffers(), strict=True)
    )


def test_gradients_reach_neither_parameters_nor_the_callers_graph(pipe: Pipe) -> None:
    pipeline = pipe(sequential(*perceptron()))
    source = rows(7)
    seen: list[Tensor] = []
    for tensor in chain(pipeline.parameters(), [source]):
        tensor.register_post_accumulate_grad_hook(seen.append)

    verify(pipeline, source * 2)

    assert not seen


def test_callers_graph_is_not_used_up(pipe: Pipe) -> None:
    pipeline = pipe(sequential(Call(lambda x: x["a"] * x["b"]), linear()))
    source = rows(7)
    batch = {"a": source, "b": source.exp()}

    verify(pipeline, batch)

    pipeline(batch).sum().backward()
    assert source.grad is not None


def test_weights_that_it_cast_are_forgotten(pipe: Pipe) -> None:
    pipeline = pipe(sequential(linear(), linear(), dtype=torch.float32))
    weight, x = pipeline.get_parameter("0.weight"), torch.ones(1, W)

    with torch.autocast("cpu", torch.bfloat16):
        verify(pipeline, rows(7).float())
        with torch.no_grad():
            weight.zero_()
        y = F.linear(x, weight)

    assert not y.any()


def test_forward_before_it_keeps_its_backward(pipe: Pipe) -> None:
    class Masked(nn.Module):
        """Saves a buffer for backward, which must not be written to."""

        mask: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.tensor([1.0, 0.0, 2.0]))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.mask

    pipeline = pipe(sequential(linear(), Masked(), linear()), mode="never")
    loss = pipeline(rows(7)).sum()

    verify(pipeline, rows(5))

    loss.backward()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_within_checkpointing(use_reentrant: bool, pipe: Pipe) -> None:
    begun: list[bool] = []
    parities: list[Parity] = []

    def forward(x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and not begun:
            begun.append(True)
            parities.append(verify(pipeline, x))
        return pipeline(x)

    pipeline = pipe(sequential(linear(), nn.Tanh(), linear()))

    checkpoint(forward, rows(7), use_reentrant=use_reentrant).sum().backward()

    assert [parity.difference for parity in parities] == [None]
    assert pipeline[0].weight.grad is not None


def test_parameter_that_lives_on_another_device_is_copied_and_put_back() -> None:
    layer = nn.Linear(W, W)
    layout = lay_out([Partition(0, 0, (layer,))], [torch.device("meta")])
    layout = layout.with_homes({layer.get_parameter("weight"): torch.device("cpu")})
    stage = Stage(layout, 0, deferred_batch_norm=True)
    weight = layer.weight

    with following(stage):
        assert layer.weight.is_meta and layer.weight.grad_fn is not None
        assert not layer.bias.is_meta

    assert layer.weight is weight
