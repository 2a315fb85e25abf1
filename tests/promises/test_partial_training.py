"""Transparency: frozen layers cost nothing, and the others train as in the plain module.

Frozen stages, parts trained beside a frozen base, and parameters that take turns.
"""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_gpipe.core.schedules import ActivationCheckpointing
from tests.support.learning import OPTIMIZERS, Make, learn, on_every_optimizer
from tests.support.models import (
    Runs,
    assert_same,
    assert_same_step,
    gradients,
    perceptron,
    rows,
    step,
    whole_batch_loss,
)
from tests.support.pipes import RECOMPUTED, M, Pipe, every_mode

W = 3


class Meter(nn.Module):
    """A linear layer that counts its forwards and backwards."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(W, W)
        self.runs = Runs()

    def forward(self, x: Tensor) -> Tensor:
        self.runs.forward.append(None)
        return _Metered.apply(self.linear(x), self)


class _Metered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, meter: Meter) -> Tensor:
        ctx.meter = meter
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.meter.runs.backward.append(None)
        return gradients[0], None


def meters(depth: int = 6) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(Meter() for _ in range(depth))).double()


def readings(module: nn.Module) -> list[tuple[int, int]]:
    """How often each layer ran forward and backward, by micro-batch of the pipeline."""
    found = [layer for layer in module.modules() if isinstance(layer, Meter)]
    return [(len(meter.runs.forward), len(meter.runs.backward)) for meter in found]


# Frozen stages.


@every_mode
@pytest.mark.parametrize("frozen", [0, 1, 2, 3, 4, 6])
def test_frozen_first_layers_run_forward_once(
    pipe: Pipe, frozen: int, mode: ActivationCheckpointing
) -> None:
    plain = meters()
    plain[:frozen].requires_grad_(False)
    pipeline = pipe(plain, stages=3)
    x = rows(7).detach()

    for module in (plain, pipeline):
        y = module(x)
        if y.requires_grad:
            whole_batch_loss(y).backward()

    stages_without = frozen // 2
    forwards = [M + RECOMPUTED[mode] * (k // 2 >= stages_without) for k in range(6)]
    backwards = [M * count for _, count in readings(plain)]
    assert readings(pipeline) == list(zip(forwards, backwards, strict=True))
    assert backwards == [M * (k >= frozen) for k in range(6)]
    assert_same(gradients(pipeline), gradients(plain))


@every_mode
def test_frozen_stage_between_two_that_learn(pipe: Pipe) -> None:
    plain = meters()
    plain[2:4].requires_grad_(False)
    pipeline = pipe(plain, stages=3)

    assert_same_step(pipeline, plain, rows(7))
    assert [backwards for _, backwards in readings(pipeline)] == [M] * 6


@every_mode
def test_frozen_last_stages(pipe: Pipe) -> None:
    plain = meters()
    plain[2:].requires_grad_(False)
    x = rows(7).detach()
    pipeline = pipe(plain, stages=3)

    assert_same_step(pipeline, plain, x)
    assert set(gradients(pipeline)) == {
        f"{k}.linear.{n}" for k in (0, 1) for n in ("weight", "bias")
    }


@every_mode
def test_gradient_of_the_input_of_a_frozen_model(pipe: Pipe) -> None:
    plain = meters()
    plain.requires_grad_(False)

    actual, expected = step(pipe(plain, stages=3), rows(7)), step(plain, rows(7))

    assert_same(actual._asdict(), expected._asdict())
    assert actual.gradients == {}
    assert len(actual.input_gradients) == 1


def test_wholly_frozen_model_runs_forward_once(pipe: Pipe) -> None:
    plain = meters()
    plain.requires_grad_(False)
    pipeline = pipe(plain, stages=3, mode="always")

    assert not pipeline(rows(7).detach()).requires_grad

    assert readings(pipeline) == [(M, 0)] * 6


FROZEN: dict[str, Callable[[str], bool]] = {
    "weights": lambda name: name.endswith("weight"),
    "biases": lambda name: name.endswith("bias"),
    "first": lambda name: name < "3",
    "last": lambda name: name > "3",
    "middle": lambda name: name.startswith("2"),
}


@pytest.mark.parametrize("frozen", FROZEN.values(), ids=FROZEN)
def test_backward_does_no_more_than_the_plain_modules(
    pipe: Pipe, frozen: Callable[[str], bool]
) -> None:
    plain, counts = perceptron(6), []
    for name, parameter in plain.named_parameters():
        parameter.requires_grad_(not frozen(name))

    for module in (plain, pipe(plain, stages=3, mode="never")):
        loss = whole_batch_loss(module(rows(7).detach()))
        with FlopCounterMode(display=False) as counter:
            loss.backward()
        counts.append(counter.get_total_flops())

    assert counts[1] == counts[0]


@every_mode
def test_batch_norms_in_eval_mode_while_the_rest_learns(pipe: Pipe) -> None:
    torch.manual_seed(3)
    norms = [nn.BatchNorm1d(W).eval().requires_grad_(False) for _ in range(2)]
    plain = nn.Sequential(nn.Linear(W, W), norms[0], norms[1], nn.Linear(W, W)).double()
    for norm in norms:
        norm.running_mean = torch.rand(W, dtype=torch.float64)
    pipeline = pipe(plain)

    learn(plain, OPTIMIZERS["adam"])
    learn(pipeline, OPTIMIZERS["adam"])

    assert_same(pipeline.state_dict(), plain.state_dict())
    assert_same(pipeline.get_buffer("1.running_mean"), norms[0].running_mean)
    assert pipeline.get_buffer("1.num_batches_tracked") == 0


# A small part beside a frozen base.


class LowRank(nn.Module):
    """A frozen linear layer and a trained update of rank 1."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(W, W).requires_grad_(False)
        self.down = nn.Linear(W, 1, bias=False)
        self.up = nn.Linear(1, W, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


@every_mode
@on_every_optimizer
def test_low_rank_updates_of_a_frozen_base(pipe: Pipe, make: Make) -> None:
    torch.manual_seed(3)
    plain = nn.Sequential(LowRank(), nn.Tanh(), LowRank(), nn.Tanh(), LowRank(), nn.Tanh()).double()
    pipeline, before = pipe(plain, stages=3), deepcopy(plain.state_dict())

    learn(plain, make)
    learn(pipeline, make)

    assert_same(pipeline.state_dict(), plain.state_dict())
    changed = {
        name for name, value in pipeline.state_dict().items() if value.ne(before[name]).any()
    }
    assert changed == {f"{k}.{part}.weight" for k in (0, 2, 4) for part in ("down", "up")}


@every_mode
@on_every_optimizer
def test_learning_with_a_frozen_stage(pipe: Pipe, make: Make) -> None:
    plain = perceptron(6)
    plain[2:4].requires_grad_(False)
    pipeline = pipe(plain, stages=3)

    learn(plain, make)
    learn(pipeline, make)

    assert_same(pipeline.state_dict(), plain.state_dict())


# Parameters that take turns.


@every_mode
def test_stages_that_learn_in_turn(pipe: Pipe) -> None:
    plain = perceptron(6)
    pipeline = pipe(plain, stages=3)
    ends = []

    for module in (plain, pipeline):
        layers = list(module)
        optimizers = [torch.optim.Adam(layers[k].parameters(), lr=0.1) for k in (0, 2, 4)]
        for seed in range(6):
            for k, layer in enumerate(layers):
                layer.requires_grad_(k == 2 * (seed % 3))
            step(module, rows(7, seed=seed).detach())
            assert {name[0] for name in gradients(module)} == {str(2 * (seed % 3))}
            optimizers[seed % 3].step()
            module.zero_grad()
        ends.append(module.state_dict())

    assert_same(ends[1], ends[0])


def test_recomputation_begins_when_a_stage_is_thawed(pipe: Pipe) -> None:
    plain = meters(4)
    plain[:2].requires_grad_(False)
    pipeline, x = pipe(plain, mode="always"), rows(7).detach()
    step(pipeline, x)
    assert readings(pipeline)[:2] == [(M, 0)] * 2

    for module in (plain, pipeline):
        module.requires_grad_(True)
        module.zero_grad()

    assert_same_step(pipeline, plain, x)
    assert readings(pipeline)[:2] == [(3 * M, M)] * 2


@every_mode
@pytest.mark.parametrize("name", ["0.weight", "2.bias", "4.weight"])
def test_parameter_thawed_between_forward_and_backward(pipe: Pipe, name: str) -> None:
    """Once recomputation used the parameter itself, which got a gradient of a few of the rows."""
    plain = perceptron(6)
    plain.get_parameter(name).requires_grad_(False)

    for module in (plain, pipeline := pipe(plain, stages=3)):
        loss = whole_batch_loss(module(rows(7)))
        module.get_parameter(name).requires_grad_(True)
        loss.backward()

    assert name not in gradients(plain)
    assert_same(gradients(pipeline), gradients(plain))


@every_mode
@pytest.mark.parametrize("name", ["0.weight", "2.bias", "4.weight"])
def test_parameter_frozen_between_forward_and_backward(pipe: Pipe, name: str) -> None:
    plain = perceptron(6)

    for module in (plain, pipeline := pipe(plain, stages=3)):
        loss = whole_batch_loss(module(rows(7)))
        module.get_parameter(name).requires_grad_(False)
        loss.backward()

    assert name not in gradients(plain)
    assert_same(gradients(pipeline), gradients(plain))


@every_mode
def test_frozen_parameter_edited_between_forward_and_backward(pipe: Pipe) -> None:
    """Once recomputation took the edited values, so the gradients were wrong without an error."""
    plain = perceptron(6)
    plain[2].requires_grad_(False)

    for module in (plain, pipe(plain, stages=3)):
        loss = whole_batch_loss(module(rows(7)))
        with torch.no_grad():
            module.get_parameter("2.weight").mul_(2)
        with pytest.raises(RuntimeError, match="edited between a forward|modified by an inplace"):
            loss.backward()


@every_mode
def test_frozen_parameter_replaced_between_forward_and_backward(pipe: Pipe) -> None:
    """Once recomputation ran with the new one, so the gradients were wrong without an error."""
    plain = perceptron(6)
    plain[2].requires_grad_(False)

    for module in (plain, pipeline := pipe(plain, stages=3)):
        loss = whole_batch_loss(module(rows(7)))
        linear = module[2]
        assert isinstance(linear, nn.Linear)
        linear.weight = nn.Parameter(torch.ones_like(linear.weight), requires_grad=False)
        loss.backward()

    assert_same(gradients(pipeline), gradients(plain))


@every_mode
def test_functional_call_with_frozen_parameters(pipe: Pipe) -> None:
    plain = perceptron(6)
    plain[2].requires_grad_(False)
    weight = torch.full((W, W), 0.5, dtype=torch.float64)

    for module in (plain, pipeline := pipe(plain, stages=3)):
        y = torch.func.functional_call(module, {"2.weight": weight}, (rows(7),))
        whole_batch_loss(y).backward()

    assert_same(gradients(pipeline), gradients(plain))
