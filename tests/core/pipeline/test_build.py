"""A pipeline that is cut anew between two steps computes what it did."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe import GPipe
from tests.support.models import perceptron, rows
from tests.support.pipes import Pipe, every_mode, with_and_without_threads
from tests.support.traced_models import UNet


class Blocks(nn.Module):
    """Blocks in a loop, with something around them."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = x + block(x).tanh()
        return x


def normed() -> nn.Sequential:
    layers: list[nn.Module] = [nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, *deepcopy(layers))


def trained(model: GPipe, x: Tensor, balances: list[Any]) -> dict[str, Tensor]:
    """The state after a step with each balance; None keeps it."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for balance in balances:
        if balance is not None:
            model.rebalance(balance)
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
    return model.state_dict()


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@every_mode
@with_and_without_threads
@pytest.mark.parametrize("build", [lambda: perceptron(6), normed])
def test_weights_of_layers_are_equal_to_the_bit(
    pipe: Pipe, build: Callable[[], nn.Sequential]
) -> None:
    module = build()
    x = torch.rand(7, 4) if module[0].in_features == 4 else rows(7)
    moved, stayed = pipe(module, [2, 2, 2]), pipe(module, [2, 2, 2])

    assert_equal(
        trained(moved, x, [None, [1, 1, 4], [4, 1, 1], None]), trained(stayed, x, [None] * 4)
    )
    assert moved.balance == [4, 1, 1]
    assert [len(stage.partition.layers) for stage in moved.stages] == [4, 1, 1]


@pytest.mark.parametrize(
    "build, module, x, balances",
    [
        (Blocks, "blocks", torch.rand(6, 4), [[2, 2], [1, 3], [3, 1]]),
        (UNet, None, torch.rand(4, 3, 8, 8, dtype=torch.float64), [[10, 13], [3, 20], [17, 6]]),
    ],
    ids=["ModuleList", "traced"],
)
def test_weights_of_any_module_are_equal_to_the_bit(
    build: Callable[[], nn.Module], module: str | None, x: Tensor, balances: list[list[int]]
) -> None:
    def run(each: list[Any]) -> dict[str, Tensor]:
        torch.manual_seed(0)
        options: dict[str, Any] = {"devices": ["cpu"] * 2, "chunks": 2, "module": module}
        model = GPipe(build(), balances[0], **options)
        try:
            return trained(model, x, each)
        finally:
            model.close()

    assert_equal(run([None, *balances[1:]]), run([None] * 3))


def test_several_modules() -> None:
    def run(each: list[Any]) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(perceptron(4), perceptron(4))
        options: dict[str, Any] = {"devices": ["cpu"] * 2, "chunks": 2, "module": ["0", "1"]}
        pipeline = GPipe(model, [[2, 2], [2, 2]], **options)
        try:
            return trained(pipeline, rows(5), each)
        finally:
            pipeline.close()

    assert_equal(run([None, [[1, 3], [3, 1]]]), run([None] * 2))


def test_observers_see_the_mini_batches_after_a_move(pipe: Pipe) -> None:
    model = pipe(perceptron(4), [2, 2])
    seen: list[Any] = []
    handle = model.observe(seen.append)

    trained(model, rows(7), [None, [1, 3]])

    assert [len(each.layout.partitions[0].layers) for each in seen] == [2, 1]
    handle.remove()
    model(rows(7))
    assert len(seen) == 2


def test_parameters_stay_the_same_objects_with_their_gradients(pipe: Pipe) -> None:
    model = pipe(perceptron(4), [2, 2])
    model(rows(7)).sum().backward()
    before = [(parameter, parameter.grad) for parameter in model.parameters()]

    model.rebalance([1, 3])

    after = [(parameter, parameter.grad) for parameter in model.parameters()]
    assert all(p is q and g is h for (p, g), (q, h) in zip(before, after, strict=True))


def test_tied_weights_follow(pipe: Pipe) -> None:
    module = perceptron(4)
    module[2].weight = module[0].weight
    model = pipe(module, [2, 2], mode="never")
    plain = deepcopy(module)

    model.rebalance([1, 3])
    model(rows(7)).sum().backward()
    plain(rows(7)).sum().backward()

    torch.testing.assert_close(model[0].weight.grad, plain[0].weight.grad)


# Refusals: nothing has changed afterwards.


@pytest.mark.parametrize(
    "balance, error, found",
    [
        ([1, 1, 2], ValueError, "as many stages as the pipeline has: got [1, 1, 2]"),
        ([3, 2], ValueError, "balance=[3, 2] (sum 5) for the 4 layers"),
        ("time", TypeError, "balance='time'"),
    ],
)
def test_balance_that_does_not_fit(
    pipe: Pipe, balance: Any, error: type[Exception], found: str
) -> None:
    model = pipe(perceptron(4), [2, 2])

    with pytest.raises(error) as raised:
        model.rebalance(balance)

    assert found in str(raised.value)
    assert model.balance == [2, 2]
    trained(model, rows(7), [None])


def test_balance_by_which_stages_would_share_a_module(pipe: Pipe) -> None:
    shared = nn.Linear(4, 4)
    model = pipe(nn.Sequential(nn.Linear(4, 4), *(nn.Sequential(shared) for _ in "12")), [1, 2])
    x = torch.rand(7, 4)

    with pytest.raises(ValueError, match="must not share modules"):
        model.rebalance([2, 1])

    assert model.balance == [1, 2]
    trained(model, x, [None])


def test_mini_batch_that_waits_for_its_backward(pipe: Pipe) -> None:
    model = pipe(perceptron(4), [2, 2])
    loss = model(rows(7)).sum()

    with pytest.raises(RuntimeError, match="waits for its backward"):
        model.rebalance([1, 3])

    loss.backward()
    model.rebalance([1, 3])
