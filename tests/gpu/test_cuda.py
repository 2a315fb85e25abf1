"""What only a CUDA device can get wrong: copies, the autograd engine's threads, streams."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.gpu.models import DEVICES, GPU, ON_GPU, assert_same, batch, gradients, layers
from tests.support.pipes import Pipe, every_mode, with_and_without_threads

pytestmark = ON_GPU


def step(module: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Everything that one step gives, by name."""
    x = x.detach().requires_grad_()
    y = module(x)
    y.square().mean().backward()
    assert x.grad is not None and x.grad.device == x.device
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    return {"output": y.detach(), "input": x.grad, **gradients(module), **buffers}


def within(seconds: float, work: Callable[[], Any]) -> Any:
    """What ``work`` returns; a deadlock is a failure, where it would block pytest for good."""
    result: list[Any] = []
    thread = threading.Thread(target=lambda: result.append(work()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "deadlock"
    assert result, "raised; see the warning of the thread's exception"
    return result[0]


# Transparency.


@every_mode
@pytest.mark.parametrize("chunks", [1, 6])
@pytest.mark.parametrize("devices", DEVICES)
def test_transparency(pipe: Pipe, devices: list[str], chunks: int) -> None:
    plain = layers()
    pipeline = pipe(plain, devices=devices, chunks=chunks)

    found = step(pipeline, batch().to(devices[0]))

    assert found["output"].device == torch.device(devices[-1])
    assert_same(found, step(plain, batch()))


@pytest.mark.parametrize("devices", DEVICES)
def test_running_statistics(pipe: Pipe, devices: list[str]) -> None:
    # A batch norm normalises by micro-batch; first, its running statistics depend on data alone.
    plain = nn.Sequential(nn.BatchNorm1d(8, dtype=torch.float64), *layers())
    pipeline = pipe(plain, devices=devices, chunks=4)

    for seed in range(3):
        plain(batch(seed=seed))
        pipeline(batch(seed=seed).to(devices[0]))

    assert_same(dict(pipeline.named_buffers()), dict(plain.named_buffers()))


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("where", ["cpu", GPU])
def test_input_on_another_device(pipe: Pipe, devices: list[str], where: str) -> None:
    plain = layers()
    pipeline = pipe(plain, devices=devices, chunks=4)

    found = step(pipeline, batch().to(where))

    assert_same(found, step(plain, batch()))


@pytest.mark.parametrize("devices", DEVICES)
def test_inference(pipe: Pipe, devices: list[str]) -> None:
    plain = layers().eval()
    pipeline = pipe(plain, devices=devices, chunks=4).eval()

    with torch.inference_mode():
        found = pipeline(batch().to(devices[0]))

    assert found.is_inference()
    assert_same(found, plain(batch()).detach())


@pytest.mark.parametrize("mode", ["always", "never"])
@pytest.mark.parametrize("devices", DEVICES)
def test_many_steps(pipe: Pipe, devices: list[str]) -> None:
    # Nothing waits for the device between the steps, and freed memory is overwritten with NaN: a
    # tensor that is reused before its last reader is done, or read before it is there, shows.
    plain = layers()
    pipeline = pipe(plain, devices=devices, chunks=5)
    batches = [batch(rows=1 + k % 17, seed=k) for k in range(34)]

    found = []
    for x in batches:
        pipeline(x.to(devices[0])).square().sum().backward()
        found.append(gradients(pipeline))
        pipeline.zero_grad()
        for size in (64, 512, 4096, 32768):
            torch.full((size,), float("nan"), device=GPU)

    for k, x in enumerate(batches):
        plain.zero_grad()
        plain(x).square().sum().backward()
        assert_same(found[k], gradients(plain))


# Note [The blocking node must be a CPU node].


@pytest.mark.parametrize("mode", ["always", "never"])
@pytest.mark.parametrize("loss_on", ["cpu", GPU])
@pytest.mark.parametrize("devices", DEVICES)
def test_backward_does_not_block_its_own_device(
    pipe: Pipe, devices: list[str], loss_on: str
) -> None:
    # Before and after the pipeline are nodes that the engine runs on the thread of the device. Were
    # the node that waits for the workers one of them, their backward would wait for that thread.
    plain = layers()
    pipeline = pipe(plain, devices=devices, chunks=4)
    scale = torch.ones(8, dtype=torch.float64, device=GPU, requires_grad=True)
    expected_scale = torch.ones(8, dtype=torch.float64, requires_grad=True)

    def steps() -> Tensor | None:
        for _ in range(5):
            scale.grad = None
            y = pipeline((batch().to(GPU) * scale).to(devices[0]))
            (3 * y.to(GPU)).to(loss_on).square().mean().backward()
        return scale.grad

    found = within(60, steps)

    (3 * plain(batch() * expected_scale)).square().mean().backward()
    assert_same(found, expected_scale.grad)


def test_backward_within_a_backward(pipe: Pipe) -> None:
    # Checkpointing of the reentrant kind calls backward() on the device's own thread: there the
    # node that waits for the workers must not wait.
    plain = layers()
    pipeline = pipe(plain, devices=[GPU, GPU], chunks=4)
    x = batch().to(GPU).requires_grad_()

    def run() -> dict[str, Tensor]:
        checkpoint(pipeline, x, use_reentrant=True).square().mean().backward()
        return gradients(pipeline)

    found = within(60, run)

    plain(batch()).square().mean().backward()
    assert_same(found, gradients(plain))


def test_two_pipelines_in_one_graph(pipe: Pipe) -> None:
    # The backward of the second waits for workers while the first's is still to come.
    plain = layers()
    first, second = (pipe(plain, devices=[GPU, GPU], chunks=3) for _ in range(2))

    def both() -> dict[str, Tensor]:
        y = first(batch().to(GPU))
        second(torch.cat([y, y.sin()], 1)).square().mean().backward()
        return gradients(first)

    found = within(60, both)

    one, two = copy.deepcopy(plain), copy.deepcopy(plain)
    y = one(batch())
    two(torch.cat([y, y.sin()], 1)).square().mean().backward()
    assert_same(found, gradients(one))


@every_mode
@with_and_without_threads
@pytest.mark.parametrize("devices", DEVICES)
def test_one_backward_of_several_forwards(pipe: Pipe, devices: list[str]) -> None:
    # Without threads, the engine runs the second mini-batch's node within a backward action of the
    # first, while it waits for the GPU. Once that was taken for a layer that runs its pipeline.
    plain = layers()
    pipeline = pipe(plain, devices=devices, chunks=4)

    for module, device in ((pipeline, devices[0]), (plain, "cpu")):
        outputs = [module(batch(seed=k).to(device)) for k in range(3)]
        torch.stack([y.square().mean() for y in outputs]).prod().backward()

    assert_same(gradients(pipeline), gradients(plain))


# Streams.


# A pipeline's node is on the CPU and has no stream. PyTorch takes the gradients that it returns as
# those of the stream that is current in backward, and warns that AccumulateGrad's stream, that of
# forward, is another. It then makes that one wait: nothing is lost.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")
@pytest.mark.parametrize("mode", ["always", "never"])
@pytest.mark.parametrize("backward_on", ["side", "default"])
@pytest.mark.parametrize("devices", DEVICES)
def test_current_stream_is_a_side_stream(pipe: Pipe, devices: list[str], backward_on: str) -> None:
    plain = layers()
    pipeline = pipe(plain, devices=devices, chunks=4)
    step(pipeline, batch().to(devices[0]))  # starts threads and streams
    pipeline.zero_grad()
    values, x = batch().to(GPU), torch.full((13, 8), float("nan"), device=GPU, dtype=torch.float64)
    torch.cuda.synchronize()
    side = torch.cuda.Stream(GPU)

    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)  # tens of milliseconds: who does not wait reads NaN
        x.copy_(values)
        loss = pipeline(x.to(devices[0])).square().mean()
        if backward_on == "side":
            loss.backward()
    torch.cuda.current_stream().wait_stream(side)
    if backward_on == "default":
        loss.backward()
    found = gradients(pipeline)

    plain(batch()).square().mean().backward()
    assert_same(found, gradients(plain))


def test_default_stream_may_use_the_gradients_at_once(pipe: Pipe) -> None:
    plain = layers()
    pipeline = pipe(plain, devices=[GPU, GPU], chunks=4)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, pipeline)]

    for k in range(20):
        for module, optimizer, device in zip(
            (plain, pipeline), optimizers, ("cpu", GPU), strict=True
        ):
            optimizer.zero_grad()
            module(batch(seed=k).to(device)).square().mean().backward()
            optimizer.step()

    assert_same(dict(pipeline.state_dict()), dict(plain.state_dict()))
