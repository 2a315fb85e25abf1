"""The bytes that an optimizer keeps, and whether it updates each parameter by itself."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adafactor, Adam, AdamW

from lightning_gpipe.core.profile.optimizers import joins_parameters, optimizer_bytes


def bytes_with(optimizer: Any) -> list[int]:
    layer = nn.Linear(4, 8)
    found = optimizer_bytes(layer.parameters(), optimizer)
    return [found.get(id(p), 0) for p in layer.parameters()]


@pytest.mark.parametrize(
    "optimizer, expected",
    [
        (None, [0, 0]),
        (partial(SGD, lr=0.1), [0, 0]),
        (partial(SGD, lr=0.1, momentum=0.9), [128, 32]),
        (Adam, [2 * 128 + 4, 2 * 32 + 4]),
        (AdamW, [2 * 128 + 4, 2 * 32 + 4]),
        (partial(Adam, amsgrad=True), [3 * 128 + 4, 3 * 32 + 4]),
        (Adafactor, [(8 + 4) * 4 + 4, 32 + 4]),
    ],
)
def test_state_of_an_optimizer(optimizer: Any, expected: list[int]) -> None:
    assert bytes_with(optimizer) == expected


def test_optimizers_that_exist_are_not_stepped() -> None:
    layer = nn.Linear(4, 8)
    first = SGD([layer.weight], lr=0.1, momentum=0.9)
    second = Adam([{"params": [layer.bias], "lr": 0.1}], fused=True)
    schedule = torch.optim.lr_scheduler.StepLR(first, 1)  # it counts the steps
    before = layer.weight.clone()

    found = optimizer_bytes(layer.parameters(), [first, second])

    assert [found[id(p)] for p in layer.parameters()] == [128, 68]
    assert torch.equal(layer.weight, before) and not first.state and not second.state
    assert schedule.last_epoch == 0


def test_frozen_parameters_have_no_state() -> None:
    layer = nn.Linear(4, 8).requires_grad_(False)

    assert optimizer_bytes(layer.parameters(), Adam) == {}


def test_what_is_no_optimizer_is_refused() -> None:
    with pytest.raises(TypeError, match="optimizer must be an optimizer.*got 'adam'"):
        bytes_with("adam")


def test_optimizer_that_looks_at_values_makes_a_step_on_zeros() -> None:
    class Peeks(SGD):
        def step(self, closure: Any = None) -> Any:
            assert self.param_groups[0]["params"][0].sum().item() == 0
            return super().step(closure)

    assert bytes_with(partial(Peeks, lr=0.1, momentum=0.9)) == [128, 32]


def test_optimizer_that_makes_no_step_is_refused() -> None:
    class Stubborn(SGD):
        def step(self, closure: Any = None) -> Any:
            raise NotImplementedError("not alone")

    with pytest.raises(
        ValueError, match="NotImplementedError: not alone. In a Trainer.* pass another"
    ):
        bytes_with(partial(Stubborn, lr=0.1))


BY_ITSELF = [
    kind
    for kind in vars(torch.optim).values()
    if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer)
    and kind not in (torch.optim.Optimizer, torch.optim.LBFGS, torch.optim.SparseAdam)
]


def an_optimizer(kind: Any, **options: Any) -> torch.optim.Optimizer:
    weight = nn.Parameter(torch.ones(4, 4))
    return kind([weight], lr=0.1, **options)


@pytest.mark.parametrize("kind", BY_ITSELF, ids=lambda kind: kind.__name__)
def test_optimizers_that_update_each_parameter_by_itself(kind: Any) -> None:
    assert not joins_parameters(an_optimizer(kind))


class Clipping(SGD):
    """Divides the gradients by a norm over all, as LAMB does in a library of pretrained models."""

    def __init__(self, params: Any, lr: float, most: float = 1.0) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            group["most"] = most

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            nn.utils.clip_grad_norm_(group["params"], group["most"])
        return super().step(closure)


class Growing(SGD):
    """Has a step size for all that follows from the gradients of the step before, as Prodigy."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.factor = 1e-6

    def step(self, closure: Any = None) -> Any:
        gradients = [
            p.grad.mul_(self.factor) for group in self.param_groups for p in group["params"]
        ]
        result = super().step(closure)
        self.factor *= 1 + float(sum(x.abs().sum() for x in gradients))
        return result


class Noisy(SGD):
    """Adds noise, as stochastic gradient Langevin dynamics does."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.add_(torch.randn_like(parameter))
        return super().step(closure)


class Untried(SGD):
    """Cannot be made from a parameter and its options."""

    def __init__(self, params: Any, lr: float, others: Any) -> None:
        super().__init__(params, lr)
        assert others


@pytest.mark.parametrize(
    "optimizer, joins",
    [
        (partial(an_optimizer, torch.optim.LBFGS), True),
        (partial(an_optimizer, Clipping), True),
        (partial(an_optimizer, Clipping, most=1e9), False),
        (partial(an_optimizer, Growing), True),
        (partial(an_optimizer, Noisy), False),
        (partial(an_optimizer, Untried, others=[1]), False),
    ],
)
def test_optimizers_that_join_parameters(optimizer: Any, joins: bool) -> None:
    assert joins_parameters(optimizer()) == joins


def test_trial_of_an_optimizer_changes_nothing() -> None:
    optimizer = an_optimizer(Noisy)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(step > 2))  # it counts steps
    (group,) = optimizer.param_groups
    generator, before = torch.get_rng_state(), group["params"][0].clone()

    joins_parameters(optimizer)

    assert torch.equal(torch.get_rng_state(), generator)
    assert torch.equal(group["params"][0], before) and not optimizer.state and group["lr"] == 0.0


def test_warm_up_hides_no_joined_parameters() -> None:
    optimizer = an_optimizer(Clipping)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(step > 2))

    assert joins_parameters(optimizer)
