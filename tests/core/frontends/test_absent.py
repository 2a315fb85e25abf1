"""Tensors of another process never give a number that nobody has computed."""

import copy
import io
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_gpipe.core.frontends import await_value, is_in_another_process
from lightning_gpipe.core.frontends.stored import Source


def absent(*shape: int) -> nn.Parameter:
    parameter = nn.Parameter(torch.empty(shape, device="meta"))
    await_value(parameter, Source.ELSEWHERE)
    return parameter


P, ONE, X = absent(3, 3), torch.tensor(1.0), torch.ones(3, 3)

# PyTorch says nothing about these, and some of them return memory that nobody has written.
MIXED: dict[str, Callable[[], object]] = {
    "sum of penalties": lambda: ONE.clone().add_(P.square().sum()),
    "average of weights": lambda: X.clone().mul_(0.9).add_(P.detach().data, alpha=0.1),
    "+=": lambda: X.clone().__iadd__(P.detach()),
    "lists": lambda: torch._foreach_add_([X.clone()], [P.detach()]),
    "mask": lambda: X.clone().masked_fill_(P > 0, 1.0),
    "number": lambda: X.clone().fill_(P.detach().sum()),
    "product": lambda: X @ P.T,
    "linear": lambda: F.linear(X, P),
    "distance": lambda: torch.cdist(X, P),
    "copy": lambda: X.clone().copy_(P.detach()),
}


@pytest.mark.parametrize("compute", MIXED.values(), ids=MIXED)
def test_mixed_with_values(compute: Callable[[], object]) -> None:
    with pytest.raises(RuntimeError, match="must not use a tensor of another process"):
        compute()


def test_buffer() -> None:
    buffer = torch.empty(3, device="meta")
    await_value(buffer, Source.ELSEWHERE)

    with pytest.raises(RuntimeError, match="must not use a tensor of another process"):
        torch.ones(3).add_(buffer)


def test_alone_they_may_be_used() -> None:
    """And in lists, beside others of which each has its like."""
    own, other = absent(3, 3), nn.Parameter(torch.ones(2))
    own.data.mul_(0.9).add_(absent(3, 3).data)
    first, second = X.clone(), torch.zeros(3, 3)
    pairs = [first, own.detach()], [second, absent(3, 3).detach()]
    torch._foreach_lerp_(pairs[0], pairs[1], 0.5)
    assert torch.equal(first, torch.full((3, 3), 0.5))
    assert (ONE * own.square().sum()).is_meta and own.detach().expand_as(own).is_meta

    optimizer = torch.optim.Adam([own, other])
    other.sum().backward(inputs=[other, own])
    optimizer.step()
    optimizer.zero_grad()
    assert torch.autograd.grad(other.sum(), [other, own], allow_unused=True)[1] is None
    assert own.grad is None and torch.empty_like(own, device="cpu").shape == (3, 3)


def test_what_they_are() -> None:
    module = nn.Linear(3, 3, bias=False)
    module.weight = absent(3, 3)
    with pytest.warns(UserWarning, match="a no-op"):  # another process has the value
        module.load_state_dict({"weight": torch.ones(3, 3)})
    copied = copy.deepcopy(module).weight
    torch.save(module.state_dict(), io.BytesIO())

    assert isinstance(copied, nn.Parameter) and is_in_another_process(copied)
    assert not isinstance(module.weight.detach(), nn.Parameter)
    with pytest.raises(RuntimeError, match="must not use a tensor of another process"):
        X @ copied


def test_gradients() -> None:
    parameter: Tensor = absent(3)
    parameter.grad = torch.empty(3, device="meta")

    assert type(parameter.grad) is Tensor and parameter.grad is parameter.grad
