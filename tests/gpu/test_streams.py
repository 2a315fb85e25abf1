"""The streams of the caller's code, on several GPUs: who waits for whom.

The reference is the plain module on the CPU. A wait that is missing rarely gives wrong numbers on
real GPUs; on simulated ones it fails the test whatever the timing was.

Here are also the tests of ``streams``.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe.core.transport.copies import Copies
from tests.gpu.models import ON_GPU, WIDTH, assert_same, batch, gradients, layers
from tests.support.pipes import Pipe, every_mode, with_and_without_threads
from tests.support.transports import layout_of

pytestmark = [
    *ON_GPU,
    pytest.mark.skipif(torch.cuda.device_count() < 3, reason="needs three GPUs"),
    # See test_current_stream_is_a_side_stream.
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match"),
]
TWO, THIRD = ["cuda:0", "cuda:1"], "cuda:2"


class SideStreams:
    """Makes a side stream of each device current, which waits for the usual one at first."""

    def __init__(self, *devices: str) -> None:
        self._streams = [torch.cuda.Stream(device) for device in devices]
        self._current = ExitStack()

    def __enter__(self) -> None:
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
            self._current.enter_context(torch.cuda.stream(stream))

    def __exit__(self, *error: object) -> None:
        self._current.close()

    def rejoin(self) -> None:
        """Let the usual streams wait for these."""
        for stream in self._streams:
            torch.cuda.current_stream(stream.device).wait_stream(stream)


class Elsewhere(nn.Module):
    """Multiplies on another device, by a tensor that is there."""

    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self.scale = scale  # not a buffer, which the pipeline would move

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(self.scale.device) * self.scale).to(x.device)


def total(plain: nn.Sequential, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The gradients of the input and of the parameters on one device."""
    x = x.clone().requires_grad_()
    plain(x).square().mean().backward()
    assert x.grad is not None
    return x.grad, gradients(plain)


@every_mode
@with_and_without_threads
@pytest.mark.parametrize("backward_on", ["side", "usual"])
@pytest.mark.parametrize("away", [*TWO, THIRD])
def test_layer_that_computes_on_another_gpu(pipe: Pipe, away: str, backward_on: str) -> None:
    scale = torch.arange(WIDTH, dtype=torch.float64)
    x = batch().to(TWO[0])
    side = SideStreams(*TWO, THIRD)

    with side:
        there = scale.to(away) + 0  # computed on the caller's stream, as the layer must be
        pipeline = pipe(layers(Elsewhere(there)), devices=TWO, chunks=4, copy=False)
        loss = pipeline(x).square().mean()
        if backward_on == "side":
            loss.backward()
            there.mul_(2)  # after all that the layer has read
    side.rejoin()
    if backward_on == "usual":
        loss.backward()
        there.mul_(2)
        there.record_stream(torch.cuda.current_stream(away))

    _, expected = total(layers(Elsewhere(scale)), batch())
    assert_same(gradients(pipeline), expected)


class MakesItsOwn(nn.Module):
    """Adds a tensor that it makes on the current device, which is that of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.ones(x.shape[1:], dtype=x.dtype, device="cuda")


@every_mode
@with_and_without_threads
@pytest.mark.parametrize("devices", [TWO, TWO[::-1], [*TWO, THIRD]], ids=str)
def test_layer_that_names_no_device(pipe: Pipe, devices: list[str]) -> None:
    def make() -> nn.Sequential:
        return nn.Sequential(MakesItsOwn(), *layers(MakesItsOwn()), MakesItsOwn())

    pipeline = pipe(make(), devices=devices, chunks=4)

    pipeline(batch().to(devices[0])).square().mean().backward()

    reference = make().to(devices[-1])
    with torch.cuda.device(devices[-1]):
        reference(batch().to(devices[-1])).square().mean().backward()
    assert_same(gradients(pipeline), gradients(reference))


# Backward outside of the block in which forward was called. As after that of a plain module, code
# on the usual streams may use all gradients at once.


@every_mode
@with_and_without_threads
@pytest.mark.parametrize("chunks", [1, 4])  # nothing splits a batch of one micro-batch
@pytest.mark.parametrize("where", [*TWO, THIRD, "cpu"])
def test_gradient_of_the_input_is_used_on_the_usual_stream(
    pipe: Pipe, where: str, chunks: int
) -> None:
    pipeline = pipe(layers(), devices=TWO, chunks=chunks)
    leaf = batch().to(where).requires_grad_()
    x = 2 * leaf  # its backward runs on the usual stream

    with SideStreams(*TWO, THIRD):
        loss = pipeline(x).square().mean()
    loss.backward()
    assert leaf.grad is not None
    found = leaf.grad + 0, gradients(pipeline)

    expected, of_parameters = total(layers(), 2 * batch())
    assert_same(found, (2 * expected, of_parameters))


@every_mode
@with_and_without_threads
def test_gradients_accumulate_on_the_usual_stream(pipe: Pipe) -> None:
    pipeline = pipe(layers(), devices=TWO, chunks=4)
    x = batch().to(TWO[0])

    pipeline(x).square().mean().backward()
    with SideStreams(*TWO):
        loss = pipeline(x).square().mean()
    loss.backward()
    pipeline(x).square().mean().backward()
    found = gradients(pipeline)

    _, expected = total(layers(), batch())
    assert_same(found, {name: 3 * gradient for name, gradient in expected.items()})


@every_mode
@with_and_without_threads
@pytest.mark.parametrize("devices", [TWO, TWO[::-1]], ids=str)
def test_gradients_are_accumulated_by_nodes_of_the_usual_stream(
    pipe: Pipe, devices: list[str]
) -> None:
    pipeline = pipe(layers(), devices=devices, chunks=4)
    # Made on this stream and kept, as DistributedDataParallel does it.
    kept = [parameter.view_as(parameter).grad_fn for parameter in pipeline.parameters()]

    with SideStreams(*TWO):
        loss = pipeline(batch().to(devices[0])).square().mean()
    loss.backward()

    assert all(kept)
    _, expected = total(layers(), batch())
    assert_same(gradients(pipeline), expected)


@every_mode
@with_and_without_threads
def test_gradients_are_returned_to_the_usual_stream(pipe: Pipe) -> None:
    pipeline = pipe(layers(), devices=TWO, chunks=4)
    parameters = dict(pipeline.named_parameters())
    x = batch().to(TWO[0]).requires_grad_()

    with SideStreams(*TWO):
        loss = pipeline(x).square().mean()
    returned = torch.autograd.grad(loss, [x, *parameters.values()])
    found = tuple(gradient + 0 for gradient in returned)

    of_input, expected = total(layers(), batch())
    assert_same(found, (of_input, *expected.values()))


@every_mode
@with_and_without_threads
@pytest.mark.parametrize("backward_on", ["side", "usual"])
def test_parameter_shared_by_two_gpus(pipe: Pipe, backward_on: str) -> None:
    def tied() -> nn.Sequential:
        module = layers(nn.Linear(WIDTH, WIDTH))
        _, first, second, _ = (each for each in module if isinstance(each, nn.Linear))
        second.weight = first.weight
        return module

    pipeline = pipe(tied(), [3, 4], devices=TWO, chunks=4)
    x = batch().to(TWO[0])
    side = SideStreams(*TWO)

    with side:
        loss = pipeline(x).square().mean()
        if backward_on == "side":
            loss.backward()
    if backward_on == "side":
        side.rejoin()
    else:
        loss.backward()

    _, expected = total(tied(), batch())
    assert_same(gradients(pipeline), expected)


def test_copies_do_not_queue_up_behind_what_the_layers_compute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[list[torch.cuda.Stream]] = []
    copy = Tensor.to

    def noted(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        found.append([torch.cuda.current_stream(device) for device in TWO])
        return copy(tensor, *args, **kwargs)

    source, target = map(torch.device, TWO)
    copies = Copies(layout_of(2, [source, target]))
    x = batch().to(source)
    monkeypatch.setattr(Tensor, "to", noted)

    copies.send([x], source, target)

    usual = [torch.cuda.current_stream(device) for device in TWO]
    (side,) = found
    assert side[0] != usual[0]
    assert side[1] != usual[1]
