"""Transparency: tensors that layers capture have the plain module's gradient.

A network beside the pipeline computes the scale of a FiLM layer, or all weights of one; a learned
code is kept in a list, where nn.Module does not find it. Such a tensor is neither an input nor a
parameter of the stage that uses it, and its graph is shared by all micro-batches.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.models import Call, a_loss, assert_same, perceptron, rows
from tests.support.pipes import Pipe, every_mode, with_and_without_threads

pytestmark = every_mode


class Film(nn.Module):
    """Scales by what was assigned to it before the forward."""

    scale: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale).tanh()


def conditioned() -> tuple[nn.Sequential, nn.Sequential]:
    """Layers of which two are scaled, and the network that computes the scale."""
    torch.manual_seed(5)
    film = [nn.Linear(3, 3), Film(), nn.Linear(3, 3), Film(), nn.Linear(3, 3)]
    return nn.Sequential(*film).double(), perceptron()


def run(
    layers: Callable[[Any], Any], films: list[Film], network: nn.Module, loss_of: Callable[..., Any]
) -> dict[str, Any]:
    """The gradients of two steps."""
    results: dict[str, Any] = {}
    for k in range(2):
        x = rows(7, seed=k)
        condition = rows(1, seed=k + 5)
        scale = network(condition)[0]
        for film in films:
            film.scale = scale
        loss = loss_of(layers(x), scale)
        loss.backward()
        results[f"step {k}"] = loss.detach(), x.grad, condition.grad
    results["network"] = [parameter.grad for parameter in network.parameters()]
    return results


def films_of(module: nn.Module) -> list[Film]:
    return [each for each in module.modules() if isinstance(each, Film)]


@with_and_without_threads
@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize(
    "loss_of",
    [lambda y, scale: a_loss(y), lambda y, scale: a_loss(y) + scale.exp().sum()],
    ids=["output", "output and scale"],
)
def test_what_another_network_computed(
    pipe: Pipe, chunks: int, loss_of: Callable[..., Tensor]
) -> None:
    plain, network = conditioned()
    pipeline = pipe(plain, stages=3, chunks=chunks)

    expected = run(plain, films_of(plain), network, loss_of)
    weights = [parameter.grad for parameter in plain.parameters()]
    network.zero_grad()
    actual = run(pipeline, films_of(pipeline), network, loss_of)

    assert_same(actual, expected)
    assert_same([parameter.grad for parameter in pipeline.parameters()], weights)


@with_and_without_threads
def test_gradient_of_a_captured_leaf_is_returned_by_autograd_grad(pipe: Pipe) -> None:
    code = rows(1)[0].detach().requires_grad_()
    plain = nn.Sequential(nn.Linear(3, 3), Call(lambda x: x * code), nn.Linear(3, 3)).double()
    pipeline = pipe(plain)

    for _ in range(2):
        expected = torch.autograd.grad(a_loss(plain(rows(7))), [code, *plain.parameters()])
        actual = torch.autograd.grad(a_loss(pipeline(rows(7))), [code, *pipeline.parameters()])
        assert_same(actual, expected)
        assert code.grad is None, "autograd.grad writes nothing"


def test_hooks_of_the_other_network_are_called_once(pipe: Pipe) -> None:
    plain, network = conditioned()
    pipeline = pipe(plain, stages=3)
    calls: list[str] = []
    for name, parameter in network.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: calls.append(name))

    run(pipeline, films_of(pipeline), network, lambda y, scale: a_loss(y))

    assert sorted(calls) == sorted(2 * [name for name, _ in network.named_parameters()])


def test_captured_leaf_with_a_hook_on_its_gradient_is_refused(pipe: Pipe) -> None:
    """Autograd would call it for each micro-batch, and once more for their sum."""
    code = rows(1)[0].detach().requires_grad_()
    code.register_hook(lambda gradient: gradient * 2)
    pipeline = pipe(nn.Sequential(Call(lambda x: x * code), *perceptron()))

    with pytest.raises(RuntimeError, match=r"has a hook on its gradient.*whole\(tensor\)"):
        pipeline(rows(7))


def test_weights_of_another_layer_in_a_list(pipe: Pipe) -> None:
    """A way to tie weights without two names for them."""
    plain = perceptron(5)

    def tied(module: nn.Sequential) -> nn.Sequential:
        first = [module[0]]
        module[4] = Call(lambda x: x @ first[0].get_parameter("weight"))
        return module

    one, other = tied(plain), pipe(tied(perceptron(5)), copy=False)
    other.load_state_dict(one.state_dict())

    for module in (one, other):
        a_loss(module(rows(7))).backward()
    assert_same([p.grad for p in other.parameters()], [p.grad for p in one.parameters()])


@with_and_without_threads
def test_tensor_that_requires_a_gradient_later(pipe: Pipe) -> None:
    """The graph behind it is not kept for the other micro-batches; the error says why."""
    layers, network = conditioned()
    pipeline = pipe(layers, [2, 3])
    for film in films_of(pipeline):
        film.scale = network(rows(1))[0].detach()
    pipeline(rows(7)).sum().backward()
    scale = network(rows(1))[0]
    for film in films_of(pipeline):
        film.scale = scale

    with pytest.raises(RuntimeError, match="second time") as caught:
        pipeline(rows(7)).sum().backward()
    assert "did not require a gradient in the first" in str(caught.value)
