"""Transparency: parameters unused by a step or micro-batch have the plain gradient.

That may be None.
"""

import pytest
import torch
from torch import Tensor, nn

from tests.support.learning import Make, on_every_optimizer
from tests.support.models import assert_same, assert_same_step, gradients, rows, step
from tests.support.pipes import Pipe, every_mode

W = 3


class Experts(nn.Module):
    """Each row goes to one of two linear layers; one that gets no row is not run."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(W, W), nn.Linear(W, W)])

    def forward(self, x: Tensor) -> Tensor:
        second = x[:, 0] > 0
        y = torch.zeros_like(x)
        for chosen, expert in zip((~second, second), self.experts, strict=True):
            if chosen.any():
                y = y.masked_scatter(chosen.unsqueeze(1), expert(x[chosen]))
        return y + x


ROUTES = {
    "mixed": [1, -1, 1, -1, 1, -1, 1],
    "by micro-batch": [1, 1, 1, -1, -1, 1, 1],
    "in one micro-batch": [-1, -1, -1, -1, -1, 1, 1],
    "only the first": [-1] * 7,
    "only the second": [1] * 7,
}


def routed(signs: list[int]) -> Tensor:
    x = rows(7).detach()
    x[:, 0] = x[:, 0].abs() * torch.tensor(signs)
    return x.requires_grad_()


@every_mode
@pytest.mark.parametrize("signs", ROUTES.values(), ids=ROUTES)
def test_experts_that_some_micro_batches_use(pipe: Pipe, signs: list[int]) -> None:
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Identity(), Experts(), nn.Linear(W, W), nn.Tanh()).double()

    actual, expected = (step(each, routed(signs)) for each in (pipe(plain), plain))

    assert_same(actual._asdict(), expected._asdict())
    used = {name[10] for name in actual.gradients if name.startswith("1.")}
    assert used == {"1" if sign > 0 else "0" for sign in signs}


@every_mode
@on_every_optimizer
def test_learning_with_experts_that_come_and_go(pipe: Pipe, make: Make) -> None:
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Identity(), Experts(), Experts(), nn.Tanh()).double()
    ends = []

    for module in (plain, pipe(plain)):
        optimizer = make(module.parameters())
        for signs in ROUTES.values():
            optimizer.zero_grad()
            step(module, routed(signs))
            optimizer.step()
        ends.append(module.state_dict())

    assert_same(ends[1], ends[0])


class Optional(nn.Module):
    """A linear layer that is left out on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(W, W)
        self.used = True

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if self.used else x


@every_mode
def test_layer_left_out_in_some_steps(pipe: Pipe) -> None:
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(W, W), Optional(), nn.Tanh(), nn.Tanh()).double()
    pipeline = pipe(plain)

    for seed, used in enumerate([True, False, True]):
        for module in (plain, pipeline):
            (layer,) = (layer for layer in module if isinstance(layer, Optional))
            layer.used = used
            module.zero_grad()
        x = rows(7, seed=seed)
        assert_same_step(pipeline, plain, x)
        assert ("1.linear.weight" in gradients(pipeline)) == used


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(W, W), nn.Linear(W, W)])

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(head(x) for head in self.heads)


@every_mode
@pytest.mark.parametrize("k", [0, 1])
def test_loss_that_leaves_an_output_out(pipe: Pipe, k: int) -> None:
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(W, W), nn.Tanh(), nn.Tanh(), Heads()).double()
    pipeline = pipe(plain)

    for module in (plain, pipeline):
        module(rows(7))[k].exp().sum().backward()

    assert f"3.heads.{1 - k}.weight" not in gradients(pipeline)
    assert_same(gradients(pipeline), gradients(plain))
