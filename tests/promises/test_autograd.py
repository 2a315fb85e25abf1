"""One autograd node: each gradient arrives once per backward.

Here are also the tests of ``autograd_node``.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_gpipe.core.pipeline import GPipe
from tests.support.models import (
    Call,
    assert_same,
    gradients,
    perceptron,
    rows,
    step,
    whole_batch_loss,
)
from tests.support.pipes import Pipe, every_mode, with_and_without_threads

pytestmark = with_and_without_threads


@pytest.fixture
def plain() -> nn.Sequential:
    return perceptron(4)


@pytest.fixture
def pipeline(pipe: Pipe, plain: nn.Sequential) -> GPipe:
    return pipe(plain)


@every_mode
def test_gradients_without_accumulation(pipeline: GPipe, plain: nn.Sequential) -> None:
    expected = torch.autograd.grad(plain(rows(7)).exp().sum(), list(plain.parameters()))

    actual = torch.autograd.grad(pipeline(rows(7)).exp().sum(), list(pipeline.parameters()))

    assert_same(actual, expected)
    assert gradients(pipeline) == {}


def test_gradient_of_the_input_only(pipeline: GPipe, plain: nn.Sequential) -> None:
    x = rows(7)

    (actual,) = torch.autograd.grad(pipeline(x).exp().sum(), x)

    (expected,) = torch.autograd.grad(plain(x).exp().sum(), x)
    assert_same(actual, expected)
    assert gradients(pipeline) == {}


def test_gradient_of_some_parameters(pipeline: GPipe, plain: nn.Sequential) -> None:
    (actual,) = torch.autograd.grad(
        pipeline(rows(7)).exp().sum(), pipeline.get_parameter("2.weight")
    )

    (expected,) = torch.autograd.grad(plain(rows(7)).exp().sum(), plain.get_parameter("2.weight"))
    assert_same(actual, expected)


def test_backward_for_some_parameters_only(pipeline: GPipe) -> None:
    pipeline(rows(7)).sum().backward(inputs=[pipeline.get_parameter("0.bias")])

    assert set(gradients(pipeline)) == {"0.bias"}


def test_loss_on_a_part_of_the_rows(pipeline: GPipe, plain: nn.Sequential) -> None:
    for module in (plain, pipeline):
        module(rows(7))[2:4].sum().backward()

    assert_same(gradients(pipeline), gradients(plain))


def test_post_accumulate_hook_fires_once_per_backward(pipeline: GPipe) -> None:
    fired: list[str] = []
    for name, parameter in pipeline.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))

    for backwards in (1, 2):
        pipeline(rows(7)).sum().backward()
        assert sorted(fired) == sorted(
            [name for name, _ in pipeline.named_parameters()] * backwards
        )


def test_hook_on_the_output_changes_every_gradient(pipeline: GPipe, plain: nn.Sequential) -> None:
    for module in (plain, pipeline):
        y = module(rows(7))
        y.register_hook(lambda gradient: gradient * 3)
        y.sum().backward()

    assert_same(gradients(pipeline), gradients(plain))


@pytest.mark.parametrize("chunks", [1, 3])
def test_output_that_is_edited_in_place(chunks: int, pipe: Pipe) -> None:
    plain = perceptron(3)
    pipeline = pipe(plain, [2, 1], chunks=chunks)

    for module in (plain, pipeline):
        module(rows(7)).mul_(2).sum().backward()

    assert_same(gradients(pipeline), gradients(plain))


def test_gradients_stay_apart_from_one_another(pipeline: GPipe) -> None:
    pipeline(rows(7)).sum().backward()

    memory = [gradient.untyped_storage().data_ptr() for gradient in gradients(pipeline).values()]

    assert len(set(memory)) == len(memory)


def test_differentiating_twice_is_refused(pipeline: GPipe) -> None:
    x = rows(7)

    with pytest.raises(RuntimeError, match="cannot be differentiated twice.*for layer in self"):
        torch.autograd.grad(pipeline(x).sum(), x, create_graph=True)


def test_gradient_penalty_of_layers_one_by_one(pipeline: GPipe, plain: nn.Sequential) -> None:
    """The error says to compute it so, beside the pipeline."""
    for model in (pipeline, plain):
        h = x = rows(7)
        for k in range(len(model)):
            h = model[k](h)
        [gradient] = torch.autograd.grad(h.sin().sum(), x, create_graph=True)
        (model(rows(7)).exp().mean() + gradient.square().sum(1).mean()).backward()

    assert_same(gradients(pipeline), gradients(plain))


@every_mode
@pytest.mark.parametrize("retain", [True, False])
def test_second_backward_is_refused(pipeline: GPipe, retain: bool) -> None:
    loss = pipeline(rows(7)).sum()
    loss.backward(retain_graph=retain)

    with pytest.raises(RuntimeError, match="must run once through a pipeline's output"):
        loss.backward()


def test_backwards_of_two_outputs_in_turn_are_refused(pipe: Pipe) -> None:
    module = nn.Sequential(*perceptron(2), Call(lambda x: (x, x * 2)))
    one, two = pipe(module)(rows(7))
    one.sum().backward()

    with pytest.raises(RuntimeError, match="must run once through a pipeline's output"):
        two.sum().backward()


def test_functional_call_leaves_the_parameters(pipeline: GPipe) -> None:
    before = list(pipeline.parameters())
    others = {n: p.detach().clone().requires_grad_() for n, p in pipeline.named_parameters()}

    torch.func.functional_call(pipeline, others, rows(7)).sum().backward()

    assert all(one is two for one, two in zip(pipeline.parameters(), before, strict=True))
    assert all(other.grad is not None for other in others.values())


@every_mode
def test_functional_call_with_weights_that_are_computed(pipe: Pipe) -> None:
    """Fast weights, which are no leaves, ended in an error of ``Tensor.grad_dtype``."""
    plain = perceptron(6)
    outputs = []

    for module in (plain, pipeline := pipe(plain, stages=3)):
        fast = {name: 0.9 * p for name, p in module.named_parameters()}
        outputs.append(torch.func.functional_call(module, fast, (rows(7),)))
        whole_batch_loss(outputs[-1]).backward()

    assert_same([outputs[1]], [outputs[0]])
    assert_same(gradients(pipeline), gradients(plain))


@every_mode
def test_parameter_edited_between_forward_and_backward(pipeline: GPipe) -> None:
    loss = pipeline(rows(7)).sum()
    with torch.no_grad():
        pipeline.get_parameter("2.weight").mul_(2)

    with pytest.raises(RuntimeError, match="edited between a forward|modified by an inplace"):
        loss.backward()


# Around the pipeline.


@pytest.fixture
def _one_process_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_one_process_group")
@every_mode
def test_distributed_data_parallel_around(pipe: Pipe) -> None:
    """torchgpipe 0.0.7: a gradient came once per micro-batch: "mark a variable ready only once"."""
    plain = nn.Sequential(perceptron(2), perceptron(6), perceptron(2))
    pipeline = pipe(perceptron(6))
    whole = DistributedDataParallel(nn.Sequential(perceptron(2), pipeline, perceptron(2)))
    whole.module.load_state_dict(plain.state_dict())

    for seed in range(3):
        expected = step(plain, rows(8, seed=seed))
        actual = step(whole, rows(8, seed=seed))
        assert_same(actual.output, expected.output)
        assert_same(gradients(whole.module), expected.gradients)
