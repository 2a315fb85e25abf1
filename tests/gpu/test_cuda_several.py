"""The engine on several GPUs: their streams, threads and current devices are not those of one."""

from __future__ import annotations

import copy
import threading
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.gpu.models import assert_same, gradients
from tests.gpu.trainers import MANY, needs
from tests.support.faults import Fuse, OwnError, interrupt_the_caller, interruptible, nothing, throw
from tests.support.models import Call, Fork, Join, Through, perceptron, rows
from tests.support.pipes import Pipe, every_mode, with_and_without_threads

pytestmark = needs(2)
GPUS = [f"cuda:{k}" for k in range(max(2, MANY))]


def batch(seed: int = 1) -> Tensor:
    return rows(9, seed=seed).detach()


def backward(module: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The gradients of a step that begins without any."""
    module.zero_grad()
    module(x).square().mean().backward()
    return gradients(module)


@every_mode
@with_and_without_threads
@pytest.mark.parametrize(
    "devices, stages",
    [(GPUS, 2 * len(GPUS)), (GPUS[::-1], len(GPUS)), ([GPUS[0], "cpu", GPUS[-1], GPUS[0]], 4)],
    ids=["two-stages-each", "reversed", "over-the-cpu"],
)
def test_transparency(pipe: Pipe, devices: list[str], stages: int) -> None:
    plain = perceptron(16)
    pipeline = pipe(plain, devices=devices, stages=stages, chunks=4)

    for seed in range(3):
        found = backward(pipeline, batch(seed).to(devices[0]))

        assert_same(found, backward(plain, batch(seed)))


@every_mode
def test_nested_values_and_tied_weights(pipe: Pipe) -> None:
    one, other = nn.Linear(3, 3), nn.Linear(3, 3)
    other.weight = one.weight
    plain = nn.Sequential(
        Fork(3), Through(one), Through(nn.Tanh()), Through(other), Join(), nn.Tanh()
    ).double()
    pipeline = pipe(plain, devices=GPUS, chunks=3)

    for seed in range(3):
        found = backward(pipeline, batch(seed).to(GPUS[0]))

        assert_same(found, backward(plain, batch(seed)))


@every_mode
@pytest.mark.parametrize("grad", [True, False])
def test_edit_of_a_weight_that_another_gpu_has(pipe: Pipe, grad: bool) -> None:
    """Once the copy that a stage follows it with was edited, and the edit was lost."""
    edits, tied = nn.Embedding(5, 3, max_norm=0.1), nn.Linear(3, 5, bias=False)
    tied.weight = edits.weight
    plain = nn.Sequential(tied, Call(lambda x: x.argmax(-1)), edits, nn.Tanh())
    pipeline = pipe(plain, [1, 3], devices=GPUS[:2], copy=False)

    with (
        torch.set_grad_enabled(grad),
        pytest.raises(RuntimeError, match=r"a copy of must not be edited .* layer 2\.weight"),
    ):
        pipeline(batch().float().to(GPUS[0]))


class EditsData(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data.mul_(2)
        return super().forward(x)


def test_edit_by_its_data_of_a_weight_that_another_gpu_has(pipe: Pipe) -> None:
    """Once it was lost, silently."""
    first, edits = nn.Linear(3, 3), EditsData(3, 3)
    edits.weight = first.weight
    pipeline = pipe(nn.Sequential(first, edits).double(), [1, 1], devices=GPUS[:2], copy=False)

    with pytest.raises(RuntimeError, match=r"a copy of must not be edited .* layer 1\.weight"):
        pipeline(batch().to(GPUS[0]))


# Streams, threads, current devices.


@every_mode
def test_side_stream_on_every_device(pipe: Pipe) -> None:
    plain = perceptron(16)
    pipeline = pipe(plain, devices=GPUS, chunks=4)
    streams = [torch.cuda.Stream(device) for device in GPUS]

    for seed in range(3):
        x = batch(seed).to(GPUS[0])
        with ExitStack() as stack:
            for stream in streams:
                stream.wait_stream(torch.cuda.current_stream(stream.device))
                stack.enter_context(torch.cuda.stream(stream))
            found = backward(pipeline, x)
        for stream in streams:
            torch.cuda.current_stream(stream.device).wait_stream(stream)

        assert_same(found, backward(plain, batch(seed)))


def test_step_on_another_thread_with_another_current_device(pipe: Pipe) -> None:
    plain = perceptron(16)
    pipeline = pipe(plain, devices=GPUS, chunks=4)
    found: list[dict[str, Tensor]] = []
    current = torch.cuda.current_device()

    def work() -> None:
        torch.cuda.set_device(1)
        found.append(backward(pipeline, batch().to(GPUS[0])))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)

    assert torch.cuda.current_device() == current
    assert_same(found, [backward(plain, batch())])


class Unindexed(nn.Linear):
    """Creates tensors on the current GPU, by all ways to say so."""

    def __init__(self) -> None:
        super().__init__(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        where = "cuda" if x.is_cuda else "cpu"
        ones = torch.ones(3, device=where)
        if x.is_cuda:
            ones = ones * torch.ones(3).cuda() * torch.ones(3).to(torch.cuda.current_device())
        return _Doubled.apply(super().forward(x) * ones, where)


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, where: str) -> Tensor:
        ctx.where = where
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * torch.full((3,), 2.0, device=ctx.where), None


@every_mode
@with_and_without_threads
def test_layer_that_names_no_gpu(pipe: Pipe) -> None:
    plain = nn.Sequential(*(Unindexed() for _ in GPUS)).double()
    pipeline = pipe(plain, devices=GPUS[::-1], chunks=3)
    current = torch.cuda.current_device()

    for seed in range(3):
        found = backward(pipeline, batch(seed).to(GPUS[-1]))

        assert_same(found, backward(plain, batch(seed)))
    assert torch.cuda.current_device() == current


def test_input_that_is_overwritten_after_the_step(pipe: Pipe) -> None:
    plain = perceptron(16)
    pipeline = pipe(plain, devices=GPUS, chunks=4)
    x = torch.empty(9, 3, dtype=torch.float64, device=GPUS[0])

    for seed in range(4):
        x.copy_(batch(seed))
        found = backward(pipeline, x)
        x.fill_(float("nan"))

        assert_same(found, backward(plain, batch(seed)))


# Graphs.


def test_two_pipelines_in_opposite_directions(pipe: Pipe) -> None:
    plain = perceptron(16)
    there, back = pipe(plain, devices=GPUS, chunks=4), pipe(plain, devices=GPUS[::-1], chunks=3)

    y = there(batch().to(GPUS[0]))
    (back(y).square().mean() + y.square().mean().to(GPUS[0])).backward()

    one, two = copy.deepcopy(plain), copy.deepcopy(plain)
    y = one(batch())
    (two(y).square().mean() + y.square().mean()).backward()
    assert_same([gradients(there), gradients(back)], [gradients(one), gradients(two)])


@every_mode
def test_several_forwards_before_their_backwards(pipe: Pipe) -> None:
    plain = perceptron(16)
    pipeline = pipe(plain, devices=GPUS, chunks=4)

    for module, device in ((plain, "cpu"), (pipeline, GPUS[0])):
        losses = [module(batch(seed).to(device)).square().mean() for seed in range(3)]
        for loss in reversed(losses):
            loss.backward()

    assert_same(gradients(pipeline), gradients(plain))


def test_gradients_by_autograd_grad(pipe: Pipe) -> None:
    plain = perceptron(16)
    pipeline = pipe(plain, devices=GPUS, chunks=4)

    loss = pipeline(batch().to(GPUS[0])).square().mean()
    found = torch.autograd.grad(loss, list(pipeline.parameters()))

    expected = torch.autograd.grad(plain(batch()).square().mean(), list(plain.parameters()))
    assert_same(found, expected)
    assert [each.device for each in found] == [each.device for each in pipeline.parameters()]


def test_optimizer_step_in_the_hook_of_each_gradient(pipe: Pipe) -> None:
    plain = perceptron(16)
    pipeline = pipe(plain, devices=GPUS, chunks=4)
    for module in (plain, pipeline):
        for parameter in module.parameters():
            optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)

            def update(parameter: Tensor, optimizer: Any = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            parameter.register_post_accumulate_grad_hook(update)

    for seed in range(4):
        plain(batch(seed)).square().mean().backward()
        pipeline(batch(seed).to(GPUS[0])).square().mean().backward()

    assert_same(dict(pipeline.state_dict()), dict(plain.state_dict()))


# Interrupts.


def fused() -> nn.Sequential:
    """A layer that can fail at the end of each of four stages."""
    torch.manual_seed(0)
    layers = [(nn.Linear(3, 3), nn.Tanh(), Fuse()) for _ in range(4)]
    return nn.Sequential(*(layer for three in layers for layer in three)).double()


@with_and_without_threads
@pytest.mark.parametrize("mode", ["always", "never"])
@pytest.mark.parametrize("kind", ["forward", "backward"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_step_after_one_that_raised(pipe: Pipe, stage: int, kind: str) -> None:
    plain = fused()
    pipeline = pipe(plain, balance=[3, 3, 3, 3], devices=looped(), chunks=4)
    fuse = pipeline[3 * stage + 2]
    assert isinstance(fuse, Fuse)

    for at in range(4):
        fuse.light((kind, at), throw(OwnError("stop here")))
        with pytest.raises(OwnError, match="stop here"):
            backward(pipeline, batch().to(GPUS[0]))
        found = backward(pipeline, batch(at).to(GPUS[0]))

        assert_same(found, backward(plain, batch(at)))


@pytest.mark.parametrize("kind", ["forward", "backward"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_step_after_an_interrupt_of_the_caller(pipe: Pipe, stage: int, kind: str) -> None:
    plain = fused()
    pipeline = pipe(plain, balance=[3, 3, 3, 3], devices=looped(), chunks=4)
    fuse = pipeline[3 * stage + 2]
    assert isinstance(fuse, Fuse)

    fuse.light((kind, 1), lambda: interrupt_the_caller(nothing))
    with interruptible(), pytest.raises(KeyboardInterrupt):
        backward(pipeline, batch().to(GPUS[0]))
    found = backward(pipeline, batch().to(GPUS[0]))

    assert_same(found, backward(plain, batch()))


def looped() -> list[str]:
    """Four devices with as many GPUs among them as there are."""
    return [GPUS[k % len(GPUS)] for k in range(4)]
