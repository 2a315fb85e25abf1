"""Steps with a loss for each micro-batch: the caller's code runs on its own thread meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe import GPipe, verify_step
from lightning_gpipe.core.schedules import ActivationCheckpointing
from tests.gpu.models import DEVICES, GPU, ON_GPU, assert_same, batch, gradients, layers

pytestmark = ON_GPU

LossOf = Callable[[nn.Module, Tensor], Tensor]


def trained(loss_of: LossOf, plain: nn.Module, around: nn.Module, x: Tensor) -> tuple[Any, ...]:
    """The loss of a plain step, and its gradients, which are dropped."""
    loss = loss_of(plain, x)
    loss.backward()
    found = loss.detach(), gradients(plain), gradients(around)
    plain.zero_grad()
    around.zero_grad()
    return found


def cut(plain: nn.Sequential, devices: list[str], **options: Any) -> GPipe:
    """A pipeline of two stages, or of one for each device."""
    stages = max(2, len(devices))
    balance = [len(plain) - 2 * (stages - 1), *[2] * (stages - 1)]
    balance = balance if stages < 4 else [2, 1, 2, 1]
    return GPipe(plain, balance, devices=devices, chunks=4, **options)


@contextmanager
def on_stream(device: torch.device, *, side: bool) -> Iterator[None]:
    """The current stream of a device, or on a GPU one beside it, for which that one waits."""
    if not side or device.type != "cuda":
        yield
        return
    current, stream = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)


@pytest.mark.parametrize(
    "threads, side, mode",
    [(True, True, "always"), (False, True, "never")],
    ids=["threads", "no threads"],
)
@pytest.mark.parametrize("devices", DEVICES[1:])
def test_step(devices: list[str], threads: bool, side: bool, mode: ActivationCheckpointing) -> None:
    plain = layers()
    around = nn.Sequential(nn.Linear(8, 8), nn.Linear(4, 4)).double()
    x = batch()

    def loss_of(run: nn.Module, x: Tensor) -> Tensor:
        # A residual connection around the pipeline, on the last device.
        before = around[0](x)
        return (around[1](run(before)).square().sum(1) + before.sin().sum(1)).mean()

    expected = trained(loss_of, plain, around, x)

    pipeline = cut(plain, devices, activation_checkpointing=mode, threads=threads)
    last = torch.device(devices[-1])
    around.to(last)
    with on_stream(last, side=side):
        step = partial(loss_of, pipeline)
        found = pipeline.by_micro_batch(step, x.to(last), around=around).loss
        assert found is not None
        found.backward()
    torch.cuda.synchronize()

    assert_same((found.detach(), gradients(plain), gradients(around)), expected)
    timeline = pipeline.timeline
    assert timeline is not None
    assert {span.action for span in timeline.caller} == set(timeline.schedule.caller)
    assert all(span.end >= span.start for span in timeline.caller)
    pipeline.close()


@pytest.mark.parametrize("side", [False, True])
@pytest.mark.parametrize("devices", DEVICES[1:])
def test_chain_of_modules(devices: list[str], side: bool) -> None:
    """What one returns comes into the next, and into the loss, by code on the caller's stream."""
    model = nn.ModuleDict({"one": layers(), "between": nn.Linear(4, 8), "two": layers()}).double()
    x = batch()

    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        parts = dict(model.named_children())
        first = parts["one"](x)
        return (parts["two"](parts["between"](first).sin()) * first).mean()

    expected = trained(loss_of, model, nn.Identity(), x)

    n, stages = len(layers()), len(devices)
    balance = [[n]] if stages == 1 else [[n - stages + 1, *[1] * (stages - 1)]]
    pipeline = GPipe(
        model,
        balance * 2,
        module=["one", "two"],
        devices=devices,
        chunks=2 * stages,
        chained=True,
        activation_checkpointing="except_last",
    )
    last = torch.device(devices[-1])
    with on_stream(last, side=side):
        step = partial(loss_of, model)
        found = pipeline.by_micro_batch(step, x.to(last), around=model).loss
        assert found is not None
        found.backward()
    torch.cuda.synchronize()

    assert_same((found.detach(), gradients(model), {}), expected)
    pipeline.close()


# See test_current_stream_is_a_side_stream in test_cuda.py.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")
@pytest.mark.parametrize("devices", DEVICES)
def test_backward_on_another_stream(devices: list[str]) -> None:
    """Gradients of the step's stream are scaled there, and then used and freed on another one."""
    plain, x = layers(), batch()
    (2 * plain(x).square().mean()).backward()
    expected = gradients(plain)
    plain.zero_grad()
    pipeline = cut(plain, devices)
    x = x.to(devices[-1])
    torch.cuda.synchronize()
    side = torch.cuda.Stream(GPU)
    # As DistributedDataParallel keeps them: autograd takes these nodes for ones of this stream.
    nodes = [p.view_as(p).grad_fn for p in plain.parameters()]

    with torch.cuda.stream(side):
        loss = pipeline.by_micro_batch(lambda x: pipeline(x).square().mean(), x).loss
    torch.cuda.current_stream(GPU).wait_stream(side)
    assert loss is not None
    (2 * loss).backward()
    found = gradients(plain)
    plain.zero_grad()
    del nodes

    assert_same(found, expected)
    pipeline.close()


@pytest.mark.parametrize("devices", DEVICES[1:6])
def test_folded_stages(devices: list[str]) -> None:
    """What is around the pipeline is with the last stage, on the first device."""
    plain = layers()
    x = batch()
    plain(x).square().mean().backward()
    expected = gradients(plain)
    plain.zero_grad()
    if len(devices) > 2:
        devices = [devices[1], devices[0]]
    pipeline = GPipe(plain, [2, 1, 2, 1], devices=devices, chunks=4, folded=True)

    outcome = pipeline.by_micro_batch(
        lambda x: pipeline(x).square().mean(), x.to(devices[0]), schedule="zero_bubble_v"
    )
    assert outcome.loss is not None
    outcome.loss.backward()

    assert_same(gradients(plain), expected)
    pipeline.close()


@pytest.mark.parametrize("devices", DEVICES[1:])
def test_draws_of_the_step_and_of_layers(devices: list[str]) -> None:
    """Of the last device both draw, at the same time: neither may change the other's numbers."""
    stages = max(2, len(devices))
    found = []
    ways: list[tuple[bool, ActivationCheckpointing]] = [
        (True, "never"), (False, "always"), (True, "always"), (True, "except_last"),
    ]  # fmt: skip
    for threads, mode in ways:
        module = layers(nn.Dropout())
        around = nn.Sequential(nn.Linear(4, 4), nn.Dropout()).double().to(devices[-1])
        module.append(nn.Dropout())
        pipeline = GPipe(
            module,
            [1] * (stages - 1) + [len(module) - stages + 1],
            devices=devices,
            chunks=4,
            activation_checkpointing=mode,
            threads=threads,
        )

        def step(x: Tensor, pipeline: GPipe = pipeline, around: nn.Module = around) -> Tensor:
            return around(pipeline(x + torch.randn_like(x))).square().mean()

        torch.manual_seed(5)
        for _ in range(2):
            loss = pipeline.by_micro_batch(step, batch().to(devices[-1]), around=around).loss
            assert loss is not None
            loss.backward()
        pipeline.close()
        found.append((gradients(module), gradients(around)))

    for each in found[1:]:
        assert_same(each, found[0])


@pytest.mark.parametrize("devices", [DEVICES[1], DEVICES[-1]])
def test_verified_step(devices: list[str]) -> None:
    module = layers()
    balance = [len(module) - 1, 1] if len(devices) == 2 else [2, 1, 2, 1]
    pipeline = GPipe(module, balance, devices=devices, chunks=4)
    x = batch().to(devices[-1])

    good = verify_step(pipeline, lambda x: pipeline(x).square().mean(), x)
    bad = verify_step(pipeline, lambda x: pipeline(x).square().sum(), x)

    assert good is not None and bad is not None
    good.check()
    with pytest.raises(RuntimeError, match="It is the sum of theirs"):
        bad.check()
    assert all(parameter.grad is None for parameter in module.parameters())
    pipeline.close()


@pytest.mark.parametrize("threads", [True, False])
@pytest.mark.parametrize("devices", DEVICES[1:])
def test_scales_of_layers_and_a_penalty(devices: list[str], threads: bool) -> None:
    """Stages use what the step computes on the last device, and the step the stages' parameters."""
    plain, x = layers(), batch()
    around = nn.Sequential(nn.Linear(8, 1), nn.Linear(4, 4)).double()
    first, later = plain[0], plain[-1]
    for layer in (first, later):
        layer.register_forward_hook(lambda layer, args, output: output * layer.scale)

    def loss_of(run: nn.Module, x: Tensor) -> Tensor:
        scale = around[0](torch.ones(8, device=x.device, dtype=x.dtype)).sigmoid()
        for layer in (first, later):
            layer.scale = scale.to(next(layer.parameters()).device)
        parameters = [*plain.parameters(), *around.parameters()]
        penalty = sum(p.square().sum().to(x.device) for p in parameters)
        assert known == set(map(id, parameters))
        return around[1](run(x)).square().mean() + 0.1 * penalty

    known = set(map(id, [*plain.parameters(), *around.parameters()]))
    expected = trained(loss_of, plain, around, x)

    pipeline = cut(plain, devices, threads=threads)
    around.to(devices[-1])
    step = partial(loss_of, pipeline)
    found = pipeline.by_micro_batch(step, x.to(devices[-1]), around=around).loss
    assert found is not None
    found.backward()
    torch.cuda.synchronize()

    assert_same((found.detach(), gradients(plain), gradients(around)), expected)
    pipeline.close()
